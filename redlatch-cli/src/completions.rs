//! `redlatch completions`: scripts for shells, generated from the options and commands.

use clap::CommandFactory as _;
use clap_complete::aot;

use crate::args::{Args, Completions, Shell};
use crate::exit::{self, Failure};
use crate::output::stdout;

pub(crate) async fn completions(completions: &Completions) -> Result<u8, Failure> {
    let mut script = Vec::new();
    let shell = match completions.shell {
        Shell::Bash => aot::Shell::Bash,
        Shell::Zsh => aot::Shell::Zsh,
        Shell::Fish => aot::Shell::Fish,
    };
    aot::generate(shell, &mut Args::command(), "redlatch", &mut script);
    let text = String::from_utf8_lossy(&script).into_owned();
    stdout::raw(text).await.map(|_| exit::OK)
}
