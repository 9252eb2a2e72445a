//! Faults of clients: processes that are paused or killed.

use super::fault::{BASE, Fault, FaultDuration};
use crate::Result;
use crate::checker::Losses;
use crate::context::Context;

pub(super) const FAULTS: [Fault; 3] = [
    Fault {
        name: "client stopped",
        description: "SIGSTOP of a client process for longer than a lease while it holds and waits",
        losses: Losses::None,
        duration: FaultDuration::PastLease,
        times: 2,
        can_overlap: true,
        inject: |context, duration| {
            let number = random_process(context)?;
            context.processes.stop(number)?;
            context.wait(duration);
            context.processes.resume(number)
        },
        ..BASE
    },
    Fault {
        name: "client killed",
        description: "kill -9 of a client process while it holds and waits; another one replaces it",
        can_overlap: true,
        inject: |context, duration| {
            let number = random_process(context)?;
            context.processes.kill(number)?;
            context.wait(duration);
            context.processes.start(&context.worker)?;
            Ok(())
        },
        ..BASE
    },
    Fault {
        name: "client restarted",
        description: "kill -9 of a client process while it holds and waits; it is restarted within the \
               lease with the same client ids",
        chosen_ids: true,
        in_soak: false,
        inject: |context, duration| {
            let number = random_process(context)?;
            context.processes.kill(number)?;
            context.wait(duration);
            context
                .processes
                .start_replacement(number, &context.worker)?;
            Ok(())
        },
        ..BASE
    },
];

/// Picks a running process.
fn random_process(context: &mut Context) -> Result<usize> {
    let all = context.processes.running();
    let at = context.random.below(all.len());
    all.get(at).copied().ok_or("no client is running".into())
}
