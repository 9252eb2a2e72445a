//! Man pages for packages, generated from the help of the commands.

use std::path::Path;
use std::{fs, io};

use clap::{Command, CommandFactory as _};
use clap_mangen::roff::{Roff, bold, roman};

use crate::args::{Args, Man};
use crate::exit::{self, Failure};

/// Writes one page for `redlatch` and one for each of its commands.
pub(crate) fn man(man: &Man) -> Result<u8, Failure> {
    let mut command = Args::command();
    command.build();
    match write_pages(&command, &man.dir) {
        Ok(()) => Ok(exit::OK),
        Err(error) => Err(Failure::system("cannot write the man pages", &error)),
    }
}

fn write_pages(command: &Command, dir: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands() {
        write_pages(subcommand, dir)?;
    }
    let page = clap_mangen::Man::new(command.clone())
        .source(concat!("redlatch ", env!("CARGO_PKG_VERSION")))
        .manual("redlatch");
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut text)?;
    }
    let after_help = command
        .get_after_long_help()
        .or_else(|| command.get_after_help());
    let after_help = after_help.map(ToString::to_string).unwrap_or_default();
    after_help_sections(&after_help).to_writer(&mut text)?;
    if command.get_name() != "redlatch" {
        let see_also = [bold("redlatch"), roman("(1)")];
        let mut section = Roff::default();
        section.control("SH", ["SEE ALSO"]).text(see_also);
        section.to_writer(&mut text)?;
    }
    fs::write(dir.join(page.get_filename()), text)
}

/// Returns a section for each paragraph of the text that help ends with, line by line as in the
/// help.
fn after_help_sections(after_help: &str) -> Roff {
    let mut sections = Roff::default();
    for paragraph in after_help.split("\n\n") {
        let (title, body) = match paragraph.split_once(':') {
            Some(("Example" | "Examples", body)) => ("EXAMPLES", body),
            Some(("Exit codes", body)) => ("EXIT STATUS", body),
            _ if paragraph.is_empty() => continue,
            _ => ("NOTES", paragraph),
        };
        sections.control("SH", [title]).control("nf", []);
        for line in body.trim_start_matches([' ', '\n']).lines() {
            sections.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
        }
        sections.control("fi", []);
    }
    sections
}
