//! The processes that descend from this one. As a subreaper, this process adopts every descendant whose
//! parent has ended, so none of them can leave the tree while this process lives.

use rustix::process::Pid;

#[cfg(target_os = "linux")]
pub(crate) use linux::{adopt_orphans, descendants, is_group_orphaned};
#[cfg(not(target_os = "linux"))]
pub(crate) use others::{adopt_orphans, descendants, is_group_orphaned};

#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    pub(crate) parent: Pid,
    pub(crate) group: Pid,
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
    use std::fs;

    use rustix::process::{Pid, getpgrp, getpid, getsid, set_child_subreaper};

    use super::{Process, State};

    /// Makes this process the parent of descendants whose own parent has ended. Returns whether it is.
    pub(crate) fn adopt_orphans() -> bool {
        set_child_subreaper(Some(getpid())).is_ok()
    }

    /// Returns all descendants that have not ended, without `strangers` and their descendants.
    pub(crate) fn descendants(strangers: &HashSet<Pid>) -> Vec<Process> {
        let mut children: HashMap<Pid, Vec<Process>> = HashMap::new();
        let names = fs::read_dir("/proc").into_iter().flatten().flatten();
        for name in names.map(|entry| entry.file_name()) {
            let pid = name.to_str().and_then(|name| name.parse().ok());
            if let Some(process) = pid.and_then(Pid::from_raw).and_then(process) {
                children.entry(process.parent).or_default().push(process);
            }
        }
        let mut found = Vec::new();
        let mut parents = vec![getpid()];
        while let Some(parent) = parents.pop() {
            for process in children.remove(&parent).unwrap_or_default() {
                if !strangers.contains(&process.pid) {
                    parents.push(process.pid);
                    found.push(process);
                }
            }
        }
        found.retain(|process| process.state != State::Dead);
        found
    }

    fn process(pid: Pid) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name stands in parentheses and may contain some, and spaces.
        let (_, fields) = stat.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        let state = match fields.next()? {
            "T" | "t" => State::Stopped,
            "Z" | "X" | "x" => State::Dead,
            _ => State::Alive,
        };
        let mut id = || Pid::from_raw(fields.next()?.parse().ok()?);
        Some(Process {
            pid,
            parent: id()?,
            group: id()?,
            session: id(),
            state,
        })
    }

    /// Returns whether no process of this process's group has a parent in the same session outside of
    /// the group: no shell then controls the group as a job.
    pub(crate) fn is_group_orphaned() -> bool {
        let (group, session) = (getpgrp(), getsid(None).ok());
        let mut member = process(getpid());
        while let Some(parent) = member.and_then(|member| process(member.parent)) {
            if parent.session != session {
                return true;
            }
            if parent.group != group {
                return false;
            }
            member = Some(parent);
        }
        true
    }
}

/// Without subreapers: only CMD's process group is known.
#[cfg(not(target_os = "linux"))]
mod others {
    use std::collections::HashSet;

    use rustix::process::{Pid, getpgid, getpgrp, getppid, getsid};

    use super::Process;

    pub(crate) fn adopt_orphans() -> bool {
        false
    }

    pub(crate) fn descendants(_: &HashSet<Pid>) -> Vec<Process> {
        Vec::new()
    }

    pub(crate) fn is_group_orphaned() -> bool {
        let same_session = getsid(getppid()).ok() == getsid(None).ok();
        let same_group = getpgid(getppid()).ok() == Some(getpgrp());
        !same_session || same_group
    }
}
