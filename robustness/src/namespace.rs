//! Linux network namespace for the program and its child processes, in which a server can be cut off from
//! the others.

use std::ffi::OsStr;
use std::fs::read_link;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use redlatch_testkit::SEPARATE_NETWORK;

use crate::Result;

/// Options of `unshare`: for root, and for other users, who have to be root in the namespace.
const UNSHARE_OPTIONS: [&str; 2] = ["-n", "-Urn"];

/// Brings the new network up. Packets that table 10 routes go to a bridge without members and are lost
/// silently, as in a broken network: if they were refused (`blackhole`), servers would retry from another
/// address. The rule for local addresses comes before all others by default, so it is moved behind.
const SETUP_SCRIPT: &str = r#"
set -e
ip link set lo up
ip link add hole type bridge
ip link set hole arp off up
echo 1 >/proc/sys/net/ipv4/conf/hole/route_localnet
ip route add default dev hole table 10
ip rule add pref 100 table local
ip rule del pref 0
exec "$0" "$@"
"#;

/// Moves the program into a network of its own by restarting it there, with the same arguments and the value
/// for `outside`. Returns if the program is in it already, or if that is not possible.
pub(crate) fn enter(outside: Option<&str>) -> Result<()> {
    let here = network_namespace()?;
    if let Some(outside) = outside {
        return match here == outside {
            true => Err("it is still in the machine's network namespace".into()),
            false => Ok(()),
        };
    }
    let mut refused = Vec::new();
    for how in UNSHARE_OPTIONS {
        let start = |program: &OsStr| {
            let mut start = Command::new("unshare");
            start.args([how, "sh", "-c", SETUP_SCRIPT]).arg(program);
            start
        };
        // Checked first: this program cannot report a failure of the one that replaces it.
        if let Err(error) = run(&mut start("true".as_ref())) {
            refused.push(format!("{how}: {error}"));
            continue;
        }
        let mut again = start(std::env::current_exe()?.as_os_str());
        again.args(std::env::args_os().skip(1));
        return Err(again.args(["--outside", &here]).exec().into());
    }
    Err(refused.join("; ").into())
}

/// Returns the name of this process's network.
fn network_namespace() -> Result<String> {
    Ok(read_link("/proc/self/ns/net")?
        .to_string_lossy()
        .into_owned())
}

/// Runs a command. Its output is the error if it fails.
fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    Err(format!("{program}: {}: {message}", done.status).into())
}

/// Drops all packets between a server and the others, in both directions, until it is dropped.
pub(crate) struct Partition {
    server: Ipv4Addr,
    /// Source and destination of the dropped packets.
    cut: Vec<[String; 2]>,
}

impl Partition {
    pub(crate) fn of(server: Ipv4Addr) -> Result<Partition> {
        let (one, others) = (server.to_string(), SEPARATE_NETWORK.to_owned());
        let mut partition = Partition {
            server,
            cut: Vec::new(),
        };
        // If the second rule fails, the first one is undone as well.
        for way in [[one.clone(), others.clone()], [others, one]] {
            rule("add", &way)?;
            partition.cut.push(way);
        }
        Ok(partition)
    }
}

/// Adds or removes a rule. Packets in flight are lost, too, without notice: connections stay open.
fn rule(act: &str, [from, to]: &[String; 2]) -> Result<()> {
    let mut ip = Command::new("ip");
    ip.args(["rule", act, "pref", "10", "from", from, "to", to]);
    run(ip.args(["table", "10"]))
}

impl Drop for Partition {
    fn drop(&mut self) {
        for way in &self.cut {
            if let Err(error) = rule("del", way) {
                eprintln!("{} stays cut off: {error}", self.server);
            }
        }
    }
}
