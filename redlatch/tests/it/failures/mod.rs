//! Connections and servers that break, hang, lose data or are slow, and callers that give up.

mod availability;
mod cancel_safety;
mod fencing_tokens;
mod frozen_node;
mod full_buffers;
mod hold_generations;
mod losses;
mod many_callers;
mod outage_load;
mod server_failures;
mod wait_limits;
