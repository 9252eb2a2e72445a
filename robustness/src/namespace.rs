//! A network of the program's own (a network namespace of Linux), in which a server can be cut off from
//! the others. All that the program starts is in it, too.

use std::ffi::OsStr;
use std::fs::read_link;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use redlatch_testkit::APART;

use crate::Result;

/// Ways to get one: as root, and as anybody else, who has to be root in there.
const HOW: [&str; 2] = ["-n", "-Urn"];

/// In a new network nothing is up. What is sent by table 10 comes to a bridge where nobody is, and is lost
/// in silence, as in a network that is broken: if it were refused (`blackhole`), servers would try again
/// from another address. And loopback addresses are found before any other rule is looked at, unless that
/// comes later.
const PREPARE: &str = r#"
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

/// Puts the program into a network of its own: starts it again in there, with the same arguments and with
/// what `outside` has to be then. Returns if that is done, or cannot be.
pub(crate) fn enter(outside: Option<&str>) -> Result<()> {
    let here = here()?;
    if let Some(outside) = outside {
        return match here == outside {
            true => Err("it is still in the network of the machine".into()),
            false => Ok(()),
        };
    }
    let mut refused = Vec::new();
    for how in HOW {
        let start = |program: &OsStr| {
            let mut start = Command::new("unshare");
            start.args([how, "sh", "-c", PREPARE]).arg(program);
            start
        };
        // What goes wrong in place of this program could not be told by it.
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

/// What the network is called that this process is in.
fn here() -> Result<String> {
    Ok(read_link("/proc/self/ns/net")?
        .to_string_lossy()
        .into_owned())
}

/// Runs a command. What it says is the error, if it fails.
fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    Err(format!("{program}: {}: {said}", done.status).into())
}

/// Nothing gets from a server to the others, nor from them to it, until this is dropped.
pub(crate) struct Partition {
    server: Ipv4Addr,
    /// From where to where nothing comes through.
    cut: Vec<[String; 2]>,
}

impl Partition {
    pub(crate) fn of(server: Ipv4Addr) -> Result<Partition> {
        let (one, others) = (server.to_string(), APART.to_owned());
        let mut partition = Partition {
            server,
            cut: Vec::new(),
        };
        // One half of it is undone as well.
        for way in [[one.clone(), others.clone()], [others, one]] {
            rule("add", &way)?;
            partition.cut.push(way);
        }
        Ok(partition)
    }
}

/// What is on its way is lost, too, and nobody is told: connections stay.
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
