//! The descendants of this process. As a subreaper, this process adopts every descendant whose
//! parent has ended, so none of them can leave the tree while this process lives.

use rustix::process::Pid;

#[cfg(target_os = "linux")]
pub(crate) use linux::{adopt_orphans, descendants, is_group_orphaned, keep_descriptors, name};
#[cfg(not(target_os = "linux"))]
pub(crate) use others::{adopt_orphans, descendants, is_group_orphaned, keep_descriptors, name};

#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    /// `None` means outside this process's PID namespace; the same for group and session.
    pub(crate) parent: Option<Pid>,
    pub(crate) group: Option<Pid>,
    session: Option<Pid>,
    pub(crate) state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
pub(crate) enum State {
    Alive,
    Stopped,
    Dead,
}

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::{HashMap, HashSet};
    use std::fs::{self, File};
    use std::io;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use rustix::process::{Pid, getpid, set_child_subreaper};

    use super::{Process, State};
    use crate::process::own_processes;

    /// Descriptors for `/proc`, once [`keep_descriptors`] was called: without them, a process that
    /// has used up its own could not find the processes that it has to end.
    static KEPT: Mutex<Option<Vec<File>>> = Mutex::new(None);

    /// The directory, and a file in it.
    const KEPT_DESCRIPTORS: usize = 2;

    fn kept() -> MutexGuard<'static, Option<Vec<File>>> {
        KEPT.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refill(kept: &mut Vec<File>) -> io::Result<()> {
        while kept.len() < KEPT_DESCRIPTORS {
            kept.push(File::open("/proc")?);
        }
        Ok(())
    }

    /// Keeps the descriptors that [`descendants`] needs, from now on.
    pub(crate) fn keep_descriptors() -> io::Result<()> {
        refill(kept().get_or_insert_default())
    }

    /// Gives up the kept descriptors while `read` opens files in `/proc`, and takes them again. If
    /// another thread was faster, the next call tries again. `read` must not call this function.
    fn with_kept_descriptors<T>(read: impl FnOnce() -> T) -> T {
        let mut kept = kept();
        kept.iter_mut().for_each(Vec::clear);
        let done = read();
        let _ = kept.as_mut().map(refill);
        done
    }

    /// Makes this process adopt descendants whose own parent has ended. Returns whether it does.
    pub(crate) fn adopt_orphans() -> bool {
        set_child_subreaper(Some(getpid())).is_ok()
    }

    /// Returns all descendants that have not ended, without `excluded`, those that this process has
    /// started for itself, and their descendants.
    pub(crate) fn descendants(excluded: &HashSet<Pid>) -> io::Result<Vec<Process>> {
        let mut own_groups = own_processes::groups();
        let mut children: HashMap<Pid, Vec<Process>> = HashMap::new();
        with_kept_descriptors(|| {
            let names = fs::read_dir("/proc")?.flatten();
            for name in names.map(|entry| entry.file_name()) {
                let pid = name.to_str().and_then(|name| name.parse().ok());
                if let Some(process) = pid.and_then(Pid::from_raw).and_then(process)
                    && let Some(parent) = process.parent
                {
                    children.entry(parent).or_default().push(process);
                }
            }
            Ok::<_, io::Error>(())
        })?;
        // Also those that were started meanwhile.
        own_groups.extend(own_processes::groups());
        let mut found = Vec::new();
        let mut parents = vec![getpid()];
        while let Some(parent) = parents.pop() {
            for process in children.remove(&parent).unwrap_or_default() {
                let is_own = process
                    .group
                    .is_some_and(|group| own_groups.contains(&group));
                if !is_own && !excluded.contains(&process.pid) {
                    parents.push(process.pid);
                    found.push(process);
                }
            }
        }
        found.retain(|process| process.state != State::Dead);
        Ok(found)
    }

    /// Returns the name of a process, up to 15 bytes of it.
    pub(crate) fn name(pid: Pid) -> Option<String> {
        let name = with_kept_descriptors(|| fs::read(format!("/proc/{pid}/comm"))).ok()?;
        Some(String::from_utf8_lossy(name.trim_ascii_end()).into_owned())
    }

    fn process(pid: Pid) -> Option<Process> {
        parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(pid: Pid, stat: &str) -> Option<Process> {
        // The name is in parentheses, and may contain parentheses and spaces.
        let (_, fields) = stat.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        let state = match fields.next()? {
            "T" | "t" => State::Stopped,
            "Z" | "X" | "x" => State::Dead,
            _ => State::Alive,
        };
        // A process that is just disappearing has -1 as its group and session.
        let mut id = || {
            let id: u32 = fields.next()?.parse().ok()?;
            Some(Pid::from_raw(id.cast_signed()))
        };
        Some(Process {
            pid,
            parent: id()?,
            group: id()?,
            session: id()?,
            state,
        })
    }

    /// Returns whether no process of this process's group has a parent in the same session outside
    /// the group: no shell then controls the group as a job.
    pub(crate) fn is_group_orphaned() -> bool {
        with_kept_descriptors(|| is_orphaned(getpid(), process))
    }

    fn is_orphaned(pid: Pid, find: impl Fn(Pid) -> Option<Process>) -> bool {
        let Some(process) = find(pid) else {
            return true;
        };
        let mut member = process;
        while let Some(parent) = member.parent.and_then(&find) {
            if parent.session != process.session {
                return true;
            }
            if parent.group != process.group {
                return false;
            }
            member = parent;
        }
        true
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// Returns whether the group of process 9 is orphaned, if its `stat` and its parent's have
        /// these fields.
        fn is_orphaned_with(own: &str, parent: &str) -> bool {
            is_orphaned(Pid::from_raw(9).unwrap(), |pid| {
                let fields = if pid.as_raw_pid() == 9 { own } else { parent };
                parse(pid, &format!("{pid} (a) name) {fields} 0 -1"))
            })
        }

        #[test]
        fn groups_that_a_shell_controls_are_not_orphaned() {
            assert!(!is_orphaned_with("S 5 9 5", "S 1 5 5"));
            assert!(is_orphaned_with("S 5 9 9", "S 1 5 5"));
            assert!(is_orphaned_with("S 5 5 5", "S 0 5 5"));
        }

        #[test]
        fn process_that_disappears_is_none() {
            assert!(parse(getpid(), "9 (name) X 0 -1 -1 0 -1").is_none());
        }

        /// A shell may have been started from outside, with its group and session from there.
        #[test]
        fn group_and_session_may_be_outside_of_the_pid_namespace() {
            assert!(!is_orphaned_with("S 5 9 0", "S 0 0 0"));
            assert!(is_orphaned_with("S 5 9 9", "S 0 0 0"));
            assert!(is_orphaned_with("S 5 0 0", "S 0 0 0"));
        }
    }
}

/// Without subreapers: only CMD's process group is known.
#[cfg(not(target_os = "linux"))]
mod others {
    use std::collections::HashSet;
    use std::io;

    use rustix::process::{Pid, getpgid, getpgrp, getppid, getsid};

    use super::Process;

    pub(crate) fn keep_descriptors() -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn adopt_orphans() -> bool {
        false
    }

    pub(crate) fn descendants(_: &HashSet<Pid>) -> io::Result<Vec<Process>> {
        Ok(Vec::new())
    }

    pub(crate) fn name(_: Pid) -> Option<String> {
        None
    }

    pub(crate) fn is_group_orphaned() -> bool {
        let same_session = getsid(getppid()).ok() == getsid(None).ok();
        let same_group = getpgid(getppid()).ok() == Some(getpgrp());
        !same_session || same_group
    }
}
