//! Measures one row of a table in a fresh process of this program, so that the memory of one row is not
//! mixed with that of another.

use std::process::Stdio;

use serde_json::Value;

use crate::Result;

/// Measures a row in a child process. `args` are the name of the benchmark and the values of the row.
pub(crate) async fn in_child(args: &[String]) -> Result<Value> {
    let output = tokio::process::Command::new(std::env::current_exe()?)
        .arg("--row")
        .args(args)
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await?;
    if !output.status.success() {
        return Err(format!("the row {args:?} failed").into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Returns the powers of ten from 1000 up to this number.
pub(crate) fn powers_of_ten(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1000), |number| Some(number * 10))
        .take_while(move |number| *number <= most)
}
