//! Runs a fuzz target: with libFuzzer (`tools/fuzz`) the one in the variable REDLATCH_FUZZ_TARGET, without it once for each file
//! on the command line, `redlatch-fuzz TARGET FILE…`, to reproduce a crash.
#![cfg_attr(libfuzzer, no_main)]

#[cfg(libfuzzer)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static TARGET: std::sync::LazyLock<fn(&[u8])> = std::sync::LazyLock::new(|| {
        let name = std::env::var("REDLATCH_FUZZ_TARGET").unwrap_or_default();
        redlatch_fuzz::target(&name).expect("REDLATCH_FUZZ_TARGET names a target")
    });
    TARGET(data);
});

#[cfg(not(libfuzzer))]
fn main() -> std::process::ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(run) = args.next().and_then(|name| redlatch_fuzz::target(&name)) else {
        let names = redlatch_fuzz::TARGETS.map(|(name, _)| name).join(", ");
        eprintln!("usage: redlatch-fuzz TARGET FILE...; the targets are {names}");
        return std::process::ExitCode::from(2);
    };
    // Also reports a panic of a background task, which its runtime would catch.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
    for path in args {
        match std::fs::read(&path) {
            Ok(data) => run(&data),
            Err(error) => {
                eprintln!("redlatch-fuzz: {path}: {error}");
                return std::process::ExitCode::FAILURE;
            }
        }
    }
    std::process::ExitCode::SUCCESS
}
