//! Faults of data: keys that are deleted or overwritten.

use std::thread::sleep;

use super::fault::{BASE, Fault, FaultDuration};
use super::server::run_command;
use crate::Result;
use crate::checker::Losses;
use crate::context::Context;
use crate::history::DataLoss;

pub(super) const FAULTS: [Fault; 2] = [
    Fault {
        name: "flushed",
        description: "FLUSHALL",
        losses: Losses::Any,
        in_soak: false,
        inject: |context, duration| {
            // The process is the same.
            let loss = DataLoss {
                shows: false,
                ..DataLoss::NO_DATA
            };
            context.with_data_loss(loss, |context| {
                context.with_fault_window(|context| {
                    let master = context.master()?;
                    run_command(context.server(master), &["FLUSHALL"])
                })
            })?;
            sleep(duration);
            Ok(())
        },
        ..BASE
    },
    Fault {
        name: "overwritten",
        description: "the key of every other lock is overwritten with other data, and deleted half a \
               lease later",
        losses: Losses::Any,
        duration: FaultDuration::PastLease,
        times: 1,
        in_soak: false,
        inject: |context, duration| {
            context.with_data_loss(DataLoss::KEYS_DELETED, |context| {
                context.with_fault_window(|context| overwrite(context, duration / 3))
            })
        },
        ..BASE
    },
];

fn overwrite(context: &mut Context, duration: std::time::Duration) -> Result<()> {
    let names = context.names();
    let others: Vec<&String> = names.iter().step_by(2).collect();
    for name in &others {
        let server = context.server_of(name)?;
        // Deletes all keys of the object, because acquired permits have a key of their own. Atomically, because a
        // worker may set the number of permits meanwhile.
        let script = "redis.call('DEL', unpack(KEYS)) redis.call('RPUSH', KEYS[1], 'other data')";
        let permits = format!("{{{name}}}:timeout");
        run_command(server, &["EVAL", script, "2", name, &permits])?;
    }
    sleep(duration);
    for name in others {
        run_command(context.server_of(name)?, &["DEL", name])?;
    }
    Ok(())
}
