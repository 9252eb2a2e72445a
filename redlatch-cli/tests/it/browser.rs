//! A browser without a window: Chromium, driven by the DevTools protocol. Over its pipes, each message is JSON that ends with a NUL.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{TempDir, until};

pub(crate) struct Browser {
    child: Child,
    requests: ChildStdin,
    replies: Receiver<Value>,
    next_id: u64,
    /// The session of its page.
    session: Value,
    _profile: TempDir,
}

impl Browser {
    /// Returns `None` if there is no Chromium. With CI set there has to be one.
    pub(crate) fn start() -> Option<Browser> {
        let profile = TempDir::new();
        let mut find = Command::new("sh");
        find.args(["-c", "command -v chromium >/dev/null"]);
        if !find.status().unwrap().success() {
            let is_ci = std::env::var("CI").is_ok_and(|ci| !["", "0", "false"].contains(&&*ci));
            assert!(
                !is_ci,
                "chromium is missing; on Debian: apt-get install chromium"
            );
            eprintln!("SKIPPED: chromium is missing; on Debian: apt-get install chromium");
            return None;
        }
        // It reads requests at descriptor 3, and replies at 4.
        let mut command = Command::new("sh");
        command.args([
            "-c",
            r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#,
            "sh",
            "chromium",
        ]);
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]);
        command.args([
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path("chromium")));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let (sender, replies) = channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while output
                .read_until(0, &mut message)
                .is_ok_and(|read| read > 0)
            {
                let reply = serde_json::from_slice(&message[..message.len() - 1]).unwrap();
                if sender.send(reply).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Browser {
            requests: child.stdin.take().unwrap(),
            child,
            replies,
            next_id: 0,
            session: Value::Null,
            _profile: profile,
        };
        let page = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let page = json!({"targetId": page["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", page);
        browser.session = attached["sessionId"].clone();
        Some(browser)
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.next_id += 1;
        let mut request = json!({"id": self.next_id, "method": method, "params": params});
        if !self.session.is_null() {
            request["sessionId"] = self.session.clone();
        }
        let request = request.to_string() + "\0";
        self.requests.write_all(request.as_bytes()).unwrap();
        loop {
            // Far longer than any answer takes, also on a busy machine.
            let reply = self.replies.recv_timeout(Duration::from_secs(60));
            let mut reply = reply.unwrap_or_else(|error| panic!("{method}: {error}"));
            if reply["id"] == self.next_id {
                assert!(reply["error"].is_null(), "{method}: {reply}");
                return reply["result"].take();
            }
        }
    }

    pub(crate) fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
    }

    /// Returns the value of an expression in the page.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true});
        self.call("Runtime.evaluate", params)["result"]["value"].take()
    }

    /// Waits until the text that the page shows has all of these in it. Returns the text.
    #[track_caller]
    pub(crate) fn until_shows(&mut self, wanted: &[&str]) -> String {
        let mut text = String::new();
        until(&format!("{wanted:?} on the page"), || {
            let shown = self.value("document.body && document.body.innerText");
            text = shown.as_str().unwrap_or_default().replace('\u{a0}', " ");
            wanted.iter().all(|wanted| text.contains(wanted))
        });
        text
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
