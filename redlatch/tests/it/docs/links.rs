//! Every link of every page to a file or heading of this repository has its target.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const REPOSITORY: &str = "https://github.com/redlatch/redlatch/blob/main/";

/// Adds the pages below a folder. Those in `src` are for rustdoc, which checks its links itself.
fn pages_below(folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && !["target", "src"].contains(&&*name) {
            pages_below(&path, pages);
        } else if name.ends_with(".md") {
            pages.push(path);
        }
    }
}

/// Returns the lines that are not part of code, without their code.
fn prose(text: &str) -> Vec<String> {
    let mut is_code = false;
    let lines = text.lines().filter(|line| {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    });
    lines.map(str::to_owned).collect()
}

/// Returns the ids of the headings, as GitHub makes them.
fn ids(text: &str) -> BTreeSet<String> {
    let mut counts = BTreeMap::new();
    let headings = prose(text);
    let headings = headings.iter().filter_map(|line| {
        line.strip_prefix('#')?
            .trim_start_matches('#')
            .strip_prefix(' ')
    });
    headings
        .map(|heading| {
            let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
            let id: String = heading.trim().to_lowercase().chars().filter(kept).collect();
            let id = id.replace(' ', "-");
            let count = counts
                .entry(id.clone())
                .and_modify(|n| *n += 1)
                .or_insert(0);
            match count {
                0 => id,
                n => format!("{id}-{n}"),
            }
        })
        .collect()
}

/// Returns the targets of the links in a line.
fn targets(line: &str) -> Vec<String> {
    let without_code: String = line.split('`').step_by(2).collect();
    let links = without_code.split("](").skip(1);
    links
        .filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()))
        .collect()
}

#[test]
fn every_link_has_its_target() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut pages = Vec::new();
    pages_below(root, &mut pages);
    let (mut checked, mut broken) = (0, Vec::new());
    for page in &pages {
        let text = std::fs::read_to_string(page).unwrap();
        for target in prose(&text).iter().flat_map(|line| targets(line)) {
            let (folder, path) = match target.strip_prefix(REPOSITORY) {
                Some(path) => (root, path),
                None if target.contains("://") => continue,
                None => (page.parent().unwrap(), &*target),
            };
            checked += 1;
            let (path, id) = path.split_once('#').unwrap_or((path, ""));
            let file = match path {
                "" => page.clone(),
                path => folder.join(path),
            };
            let has_id =
                || std::fs::read_to_string(&file).is_ok_and(|text| ids(&text).contains(id));
            if !file.exists() || (!id.is_empty() && !has_id()) {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(checked > 300 && broken.is_empty(), "{checked}, {broken:#?}");
}
