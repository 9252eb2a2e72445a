//! Memory of a process, as Linux reports it.

use std::io::{Error, Result};

/// Returns the resident memory in bytes of the process with this id, or of `self`.
pub(crate) fn resident_memory(process: &str) -> Result<u64> {
    // `status` has it in kB, while `statm` would require the page size.
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kilobytes = kilobytes.and_then(|kilobytes| kilobytes.trim().parse::<u64>().ok());
    Ok(kilobytes.ok_or_else(|| Error::other("no VmRSS in status"))? * 1024)
}
