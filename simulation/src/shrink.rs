//! Shrinks a failing plan to the smallest one that still fails: fewer faults, processes, tasks and names, and an
//! earlier end.

use std::time::Duration;

use crate::plan::{Fault, Plan, PlannedUser};

/// Maximum number of runs to shrink one plan.
const MAX_TRIES: usize = 300;

/// Returns the smallest plan found that still fails. `fails` runs a plan.
pub fn shrink(plan: Plan, fails: impl Fn(&Plan) -> bool) -> Plan {
    let mut smallest = plan;
    let mut tries = 0;
    // Restarts with the first candidate after each success: the smaller a run, the faster are all later tries.
    'smaller: loop {
        for candidate in smaller_plans(&smallest) {
            if tries == MAX_TRIES {
                return smallest;
            }
            tries += 1;
            if fails(&candidate) {
                smallest = candidate;
                continue 'smaller;
            }
        }
        return smallest;
    }
}

/// Returns plans that each lack one element, the largest steps first.
fn smaller_plans(plan: &Plan) -> Vec<Plan> {
    let mut all = Vec::new();
    let mut with = |change: &dyn Fn(&mut Plan)| {
        let mut candidate = plan.clone();
        change(&mut candidate);
        all.push(candidate);
    };
    for part in [2, 4, 8] {
        let duration = plan.duration - plan.duration / part;
        if duration >= Duration::from_secs(1) {
            with(&|plan| end_at(plan, duration));
        }
    }
    if plan.processes > 1 {
        with(&|plan| {
            plan.processes -= 1;
            let last = plan.processes;
            plan.faults.retain(|one| process(one.fault) != Some(last));
        });
    }
    for i in (0..plan.faults.len()).rev() {
        with(&|plan| {
            plan.faults.remove(i);
        });
    }
    for i in (0..plan.names.len()).rev().filter(|_| plan.names.len() > 1) {
        with(&|plan| {
            plan.names.remove(i);
        });
    }
    for i in (0..plan.contended_names.len())
        .rev()
        .filter(|_| plan.contended_names.len() > 1)
    {
        with(&|plan| {
            plan.contended_names.remove(i);
        });
    }
    for i in (0..plan.jobs.len()).rev() {
        with(&|plan| {
            plan.jobs.remove(i);
        });
    }
    if plan.permanent_locks > 0 {
        with(&|plan| plan.permanent_locks = 0);
    }
    if plan.flood > 0 {
        with(&|plan| plan.flood = 0);
    }
    if plan.shuffles_tasks {
        with(&|plan| plan.shuffles_tasks = false);
    }
    if plan.tasks > 1 {
        with(&|plan| plan.tasks -= 1);
    }
    if plan.owners > 0 {
        with(&|plan| plan.owners -= 1);
    }
    if plan.clients > 1 {
        with(&|plan| plan.clients -= 1);
    }
    if plan.uses_tickets {
        with(&|plan| plan.uses_tickets = false);
    }
    if plan.uses_limits {
        with(&|plan| plan.uses_limits = false);
    }
    if plan.user != PlannedUser::Default {
        with(&|plan| {
            plan.user = PlannedUser::Default;
            plan.faults
                .retain(|one| one.fault != Fault::PasswordChanged);
        });
    }
    if plan.lacks_resp3 {
        with(&|plan| plan.lacks_resp3 = false);
    }
    if plan.chosen_ids {
        with(&|plan| plan.chosen_ids = false);
    }
    all
}

/// Ends the run earlier; faults end with it.
fn end_at(plan: &mut Plan, duration: Duration) {
    plan.duration = duration;
    plan.faults.retain(|one| one.from < duration);
    for one in &mut plan.faults {
        one.until = one.until.min(duration);
    }
}

/// Returns the process that a fault affects, if it affects one.
fn process(fault: Fault) -> Option<usize> {
    match fault {
        Fault::Cut(process, _) | Fault::Reset(process) => Some(process),
        Fault::AnswersLost(process) | Fault::SignalsFail(process) => Some(process),
        Fault::Stop(process) | Fault::Kill(process) => Some(process),
        Fault::RuntimeDropped(process) => Some(process),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ScheduledFault;

    /// A shrunk plan contains only what the failure needs.
    #[test]
    fn shrinking_removes_what_the_failure_does_not_need() {
        let is_freeze = |one: &ScheduledFault| one.fault == Fault::Freeze;
        let freezes = |plan: &Plan| plan.faults.iter().any(is_freeze);
        let plans = (1..).map(Plan::draw);
        // The first of several faults: the run can end earlier.
        let begins_with_it = |plan: &Plan| plan.faults.first().is_some_and(is_freeze);
        let mut plans = plans.filter(|plan| begins_with_it(plan) && plan.faults.len() > 2);
        let plan = plans.find(|plan| plan.processes > 2).unwrap();
        let small = shrink(plan.clone(), |plan| freezes(plan) && plan.processes >= 2);
        assert_eq!((small.faults.len(), small.processes), (1, 2), "{plan:#?}");
        assert_eq!((small.tasks, small.owners, small.clients), (1, 0, 1));
        assert_eq!((small.jobs.len(), small.permanent_locks), (0, 0));
        assert_eq!((small.names.len(), small.contended_names.len()), (1, 1));
        assert!(small.duration < plan.duration);
        assert_eq!(small.seed, plan.seed);
    }
}
