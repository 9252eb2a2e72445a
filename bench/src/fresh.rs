//! Measures one row of a table in a fresh process of this program, so that the memory of one row is not
//! mixed with that of another.

use std::process::Stdio;

use serde_json::Value;

use crate::{Result, held, waiting};

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

/// Measures a row in this process, which is such a child, and prints it as JSON.
pub(crate) async fn print_row(args: &[String]) -> Result<()> {
    let row = match args {
        [name, locks, window, lease] if name == held::NAME => {
            held::row(locks.parse()?, window.parse()?, lease.parse()?).await?
        }
        [name, tasks, names, hand_over] if name == waiting::NAME => {
            waiting::row(tasks.parse()?, names.parse()?, hand_over.parse()?).await?
        }
        _ => return Err(format!("no such row: {args:?}").into()),
    };
    println!("{row}");
    Ok(())
}

/// Returns the powers of ten from 1000 up to this number.
pub(crate) fn powers_of_ten(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1000), |number| Some(number * 10))
        .take_while(move |number| *number <= most)
}
