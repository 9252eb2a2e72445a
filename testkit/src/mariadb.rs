//! A real MariaDB server for tests.

use std::process::{Command, Stdio};

use crate::child_guard::ServerProcess;
use crate::temp_dir::TempDir;

/// A MariaDB server without databases of a user, on a free port of 127.0.0.1. It ends when dropped, and also when the process
/// that started it dies in any way. It does not flush to disk.
#[derive(Debug)]
pub struct Mariadb {
    port: u16,
    _running: ServerProcess,
    /// Declared after the process that writes to it, so that it is removed last.
    _dir: TempDir,
}

/// Creates the system tables in the directory `$1`, starts a server on the port `$2`, prints its process id, and kills it when
/// standard input ends. MariaDB refuses to run as root, so root runs it as `nobody`.
const MARIADB_SCRIPT: &str = r#"
PATH=$PATH:/usr/sbin
cd "$1" || exit
as_user=
if [ "$(id -u)" = 0 ]; then
    chown nobody .
    as_user="setpriv --reuid=nobody --regid=$(id -g nobody) --clear-groups"
fi
[ -e data ] || $as_user mariadb-install-db --no-defaults --datadir="$1/data" --auth-root-authentication-method=normal \
    --skip-test-db --skip-name-resolve >/dev/null 2>&1 || exit
$as_user mariadbd --no-defaults --datadir="$1/data" --socket="$1/socket" --bind-address=127.0.0.1 --port="$2" \
    --skip-name-resolve --innodb-flush-log-at-trx-commit=0 --innodb-buffer-pool-size=32M </dev/null 2>&1 &
echo "pid $!"
exec >/dev/null
read -r _
kill -9 $! 2>/dev/null
wait
"#;

impl Mariadb {
    /// Creates the system tables and starts the server.
    ///
    /// # Panics
    ///
    /// If MariaDB is missing or does not start.
    pub fn start() -> Mariadb {
        let dir = TempDir::new();
        let started = ServerProcess::launch_on_free_port(MARIADB_SCRIPT, &dir);
        let (port, running) =
            started.expect("MariaDB did not start; on Debian: apt-get install mariadb-server");
        Mariadb {
            port,
            _running: running,
            _dir: dir,
        }
    }

    /// Returns the URL of the user `root`, to which the name of a database is appended (`/name`).
    pub fn url(&self) -> String {
        format!("mysql://root@127.0.0.1:{}", self.port)
    }

    /// Creates a database with a script in SQL, as a user does: with the client of MariaDB, which knows `DELIMITER`.
    ///
    /// # Panics
    ///
    /// If a statement fails.
    pub fn create_database(&self, name: &str, script: &str) {
        let mut client = Command::new("mariadb")
            .args(["--no-defaults", "--host=127.0.0.1", "--user=root"])
            .arg(format!("--port={}", self.port))
            .stdin(Stdio::piped())
            .spawn()
            .expect("the client of MariaDB");
        let mut input = client.stdin.take().expect("its input");
        let script = format!("CREATE DATABASE {name}; USE {name};\n{script}");
        std::io::Write::write_all(&mut input, script.as_bytes()).expect("it reads its input");
        drop(input);
        assert!(client.wait().is_ok_and(|status| status.success()), "{name}");
    }
}
