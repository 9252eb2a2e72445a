//! The attribute macro of [`redlatch`](https://docs.rs/redlatch), which exports it with its feature `macros`.

use proc_macro::TokenStream;

mod arguments;
mod expand;

/// The generated code needs the library under its own name, `redlatch`.
#[proc_macro_attribute]
pub fn locked(arguments: TokenStream, function: TokenStream) -> TokenStream {
    expand::locked(arguments.into(), function.into()).into()
}
