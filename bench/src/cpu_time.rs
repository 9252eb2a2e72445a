//! CPU use of this process, as Linux reports it.

use std::time::Duration;

use crate::Result;

/// One clock tick of user space, which Linux keeps at 100 Hz on every machine.
const TICK: Duration = Duration::from_millis(10);

/// Returns the CPU time used so far, in user and kernel mode.
pub(crate) fn cpu_time() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The name may contain any character; the fields after its last parenthesis have fixed
    // positions.
    let (_, fields) = stat
        .rsplit_once(')')
        .ok_or("/proc/self/stat contains no name")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let field = |at: usize| -> Result<u32> {
        let field = fields.get(at).ok_or("/proc/self/stat is too short")?;
        Ok(field.parse()?)
    };
    Ok(TICK * (field(11)? + field(12)?))
}
