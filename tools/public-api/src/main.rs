//! Prints the public API that a rustdoc JSON file describes, one item a line.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1);
    let path = path.ok_or("usage: redlatch-public-api <rustdoc JSON file>")?;
    let api = public_api::Builder::from_rustdoc_json(path)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .build()?;
    print!("{api}");
    Ok(())
}
