//! Runs each target on its corpus: valid inputs, and those that once crashed it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use redlatch_fuzz::TARGETS;

/// Set by a panic, also by one of a background task, which its runtime catches.
static HAS_PANICKED: AtomicBool = AtomicBool::new(false);

#[test]
fn no_input_of_the_corpora_crashes_its_target() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        HAS_PANICKED.store(true, Ordering::Relaxed);
        print(panic);
    }));
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, run) in TARGETS {
        let corpus = std::fs::read_dir(corpora.join(name)).unwrap();
        let mut inputs = 0;
        for entry in corpus {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            run(&std::fs::read(path).unwrap());
            assert!(!HAS_PANICKED.load(Ordering::Relaxed), "a task panicked");
            inputs += 1;
        }
        assert!(inputs > 0, "the corpus of {name} is empty");
    }
    let folders = std::fs::read_dir(&corpora).unwrap().count();
    assert_eq!(folders, TARGETS.len(), "a corpus has no target");
}
