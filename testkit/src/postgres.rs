//! A real PostgreSQL server for tests.

use std::path::Path;

use crate::child_guard::ServerProcess;
use crate::temp_dir::TempDir;

/// A PostgreSQL server with an empty database, on a free port of 127.0.0.1. It ends when dropped, and
/// also when the process that started it dies in any way. It does not flush to disk.
#[derive(Debug)]
pub struct Postgres {
    port: u16,
    running: ServerProcess,
    /// Declared after the process that writes to it, so that it is removed last.
    dir: TempDir,
}

/// Creates the database in the directory `$1`, starts a server on the port `$2`, prints its process id,
/// and stops it when standard input ends. PostgreSQL refuses to run as root, so root runs it as `nobody`.
/// Debian keeps its programs out of the PATH. SIGQUIT ends all processes of the server at once; after
/// SIGKILL its shared memory would remain.
const POSTGRES_SCRIPT: &str = r#"
PATH=$PATH:$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
cd "$1" || exit
as_user=
if [ "$(id -u)" = 0 ]; then
    chown nobody .
    as_user="setpriv --reuid=nobody --regid=$(id -g nobody) --clear-groups"
fi
[ -e data ] || $as_user initdb --pgdata=data --username=postgres --auth=trust --encoding=UTF8 --no-locale \
    --no-sync --no-instructions >/dev/null || exit
$as_user postgres -D "$1/data" -h 127.0.0.1 -p "$2" -k "" -F </dev/null 2>&1 &
echo "pid $!"
exec >/dev/null
read -r _
kill -QUIT $! 2>/dev/null
wait
"#;

impl Postgres {
    /// Creates a database and starts its server.
    ///
    /// # Panics
    ///
    /// If PostgreSQL is missing or does not start.
    pub fn start() -> Postgres {
        let dir = TempDir::new();
        let started = ServerProcess::launch_on_free_port(POSTGRES_SCRIPT, &dir);
        let (port, running) =
            started.expect("PostgreSQL did not start; on Debian: apt-get install postgresql");
        Postgres { port, running, dir }
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }

    /// Returns the directory of its files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the URL of the user `postgres`, whose database is `postgres` unless another one is appended (`/name`).
    pub fn url(&self) -> String {
        format!("postgresql://postgres@127.0.0.1:{}", self.port)
    }
}
