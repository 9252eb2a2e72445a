//! Expands the attribute. The function is three futures, from the outer to the inner one:
//!
//! 1. The function itself has the guard, and releases the lock at the end.
//! 2. A block has all arguments, and acquires the lock. It ends, and is dropped, before the guard.
//! 3. A block within is the body, and runs while the lock is held.
//!
//! So no argument outlives the lock, however the function binds it, and whether it returns, loses the lock or is dropped. The
//! body has all bindings of the arguments, and drops them as a function does: the last one first. Parts of arguments that no
//! pattern binds, and arguments of which it binds a reference, are dropped with the block around it.

use std::mem::replace;

use proc_macro2::{Group, Ident, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned as _;
use syn::visit::{Visit, visit_pat_ident};
use syn::visit_mut::{VisitMut, visit_type_mut};
use syn::{
    Attribute, Error, FnArg, Pat, PatIdent, Result, ReturnType, Signature, Type, TypeInfer,
    Visibility, parse_quote,
};

use crate::arguments::Arguments;

/// A function whose body is not parsed: the macro does not change it, and an editor may be in the middle of writing it.
struct Function {
    attributes: Vec<Attribute>,
    visibility: Visibility,
    signature: Signature,
    body: Group,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> Result<Function> {
        Ok(Function {
            attributes: input.call(Attribute::parse_outer)?,
            visibility: input.parse()?,
            signature: input.parse()?,
            body: input.parse()?,
        })
    }
}

/// Returns the expanded function. After an error it returns the function as it is, so that its callers compile.
pub(crate) fn locked(arguments: TokenStream, function: TokenStream) -> TokenStream {
    expand(arguments, function.clone()).unwrap_or_else(|error| {
        let error = error.into_compile_error();
        quote!(#error #function)
    })
}

fn expand(arguments: TokenStream, function: TokenStream) -> Result<TokenStream> {
    let Function {
        attributes,
        visibility,
        mut signature,
        body,
    } = syn::parse2(function).map_err(|error| {
        Error::new(
            error.span(),
            "`locked` applies to async functions with a body",
        )
    })?;
    if signature.asyncness.is_none() {
        return Err(Error::new_spanned(
            signature.fn_token,
            "`locked` applies to async functions; other functions can hold a guard of `redlatch::blocking`",
        ));
    }
    let ReturnType::Type(_, returned) = &signature.output else {
        return Err(Error::new_spanned(
            &signature.ident,
            "a locked function must return a `Result` whose error type implements `From<redlatch::Error>`",
        ));
    };
    let Arguments {
        handle,
        lease,
        limit,
    } = syn::parse2(arguments)?;

    // Errors about the return type point at it. The variables are not visible in the function's own code.
    let span = Span::mixed_site().located_at(returned.span());
    let failed =
        quote_spanned!(span=> ::core::result::Result::Err(::core::convert::From::from(error)));
    let lease = lease.map(|lease| quote!(.lease(#lease)));
    let (request, refused) = match limit {
        None => (quote!(lock()), None),
        Some((wait, or)) => (
            quote!(try_lock().wait(#wait)),
            Some(quote_spanned! {span=>
                let ::core::option::Option::Some(guard) = guard else {
                    return #or;
                };
            }),
        ),
    };
    // The compiler needs the type of a block for each `?` and `return` in it.
    let mut output = Type::clone(returned);
    InferImplTrait.visit_type_mut(&mut output);
    let Bindings {
        names,
        arguments,
        patterns,
    } = Bindings::of(&mut signature, span);
    let last_first = names.iter().rev();
    Ok(quote_spanned! {span=>
        #(#attributes)*
        #visibility #signature {
            let mut held = ::core::option::Option::None;
            let output = {
                let held = &mut held;
                ::redlatch::__private::returns::<#output, _>(async move {
                    #(
                        // The whole argument: a pattern may bind only a part, or `ref mut`.
                        #[allow(unused_mut)]
                        let mut #arguments = #arguments;
                        let #patterns = #arguments;
                    )*
                    let request = #handle.#request #lease;
                    let guard = match ::core::future::IntoFuture::into_future(request).await {
                        ::core::result::Result::Ok(guard) => guard,
                        ::core::result::Result::Err(error) => return #failed,
                    };
                    #refused
                    let guard = ::core::option::Option::insert(held, guard);
                    let work = ::redlatch::__private::returns::<#output, _>(async move {
                        #(let _ = &#last_first;)*
                        #body
                    });
                    match ::redlatch::__private::run(guard, work).await {
                        ::core::result::Result::Ok(output) => output,
                        ::core::result::Result::Err(error) => #failed,
                    }
                })
                .await
            };
            match ::redlatch::__private::release(held).await {
                ::core::result::Result::Ok(()) => output,
                ::core::result::Result::Err(error) => #failed,
            }
        }
    })
}

/// How a function binds its arguments.
#[derive(Default)]
struct Bindings {
    /// The names in its body, in order, and names for the arguments that have none.
    names: Vec<Ident>,
    /// Names for the arguments of which it may bind only a part, or a reference.
    arguments: Vec<Ident>,
    /// The patterns of those arguments.
    patterns: Vec<Pat>,
}

impl Bindings {
    /// Replaces the patterns in the signature by names.
    fn of(signature: &mut Signature, span: Span) -> Bindings {
        let mut bindings = Bindings::default();
        for (index, input) in signature.inputs.iter_mut().enumerate() {
            let argument = match input {
                FnArg::Receiver(receiver) => {
                    bindings.names.push(receiver.self_token.into());
                    continue;
                }
                FnArg::Typed(argument) => &mut *argument.pat,
            };
            let name = format_ident!("argument_{index}", span = span);
            match argument {
                Pat::Ident(whole) if whole.by_ref.is_none() && whole.subpat.is_none() => {
                    bindings.names.push(whole.ident.clone());
                }
                Pat::Wild(_) => {
                    *argument = parse_quote!(#name);
                    bindings.names.push(name);
                }
                pattern => {
                    bindings.visit_pat(pattern);
                    bindings
                        .patterns
                        .push(replace(pattern, parse_quote!(#name)));
                    bindings.arguments.push(name);
                }
            }
        }
        bindings
    }
}

impl Visit<'_> for Bindings {
    fn visit_pat_ident(&mut self, binding: &PatIdent) {
        self.names.push(binding.ident.clone());
        visit_pat_ident(self, binding);
    }
}

/// Replaces each `impl Trait`, which only a signature can contain, with a type that the compiler infers.
struct InferImplTrait;

impl VisitMut for InferImplTrait {
    fn visit_type_mut(&mut self, node: &mut Type) {
        match node {
            Type::ImplTrait(hidden) => {
                let underscore_token = syn::Token![_](hidden.impl_token.span);
                *node = Type::Infer(TypeInfer {
                    attrs: Vec::new(),
                    underscore_token,
                });
            }
            other => visit_type_mut(self, other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that the attribute is refused with this message, and keeps the function.
    #[track_caller]
    fn assert_refused(arguments: TokenStream, function: TokenStream, message: &str) {
        let error = expand(arguments.clone(), function.clone()).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        let kept = locked(arguments, function.clone()).to_string();
        assert!(kept.contains("compile_error"), "{kept}");
        assert!(kept.ends_with(&function.to_string()), "{kept}");
    }

    #[test]
    fn wrong_functions_are_refused() {
        let arguments = quote!(client = locks, name = "a");
        for (function, message) in [
            (
                quote!(
                    fn work() -> Result<()> {
                        Ok(())
                    }
                ),
                "applies to async functions;",
            ),
            (
                quote!(
                    async fn work() {}
                ),
                "must return a `Result`",
            ),
            (
                quote!(
                    async fn work() -> Result<()>;
                ),
                "with a body",
            ),
            (
                quote!(
                    struct Work;
                ),
                "with a body",
            ),
        ] {
            assert_refused(arguments.clone(), function, message);
        }
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for (arguments, message) in [
            (quote!(), "needs a client"),
            (quote!(name = "a"), "needs a client"),
            (quote!(client = locks), "needs the name"),
            (
                quote!(client = locks, name = "a", waits = "2s"),
                "unknown argument `waits`; the arguments are `client`",
            ),
            (
                quote!(client = locks, name = "a", name = "b"),
                "`name` is given twice",
            ),
            (
                quote!(client = locks, name = "a", kind = red),
                "unknown kind of lock",
            ),
            (
                quote!(client = locks, name = "a", kind = "fair"),
                "unknown kind of lock",
            ),
            (
                quote!(client = locks, name = "a", wait = "2s"),
                "`wait` needs `or`",
            ),
            (
                quote!(client = locks, name = "a", or = Ok(())),
                "`or` needs `wait`",
            ),
            (
                quote!(client = locks, name = "a", wait = "2", or = Ok(())),
                "invalid duration",
            ),
            (
                quote!(client = locks, name = "a", lease = "2 s"),
                "invalid duration",
            ),
            (quote!(client = locks, name), "expected `=`"),
            (quote!(client = locks name = "a"), "expected `,`"),
        ] {
            assert_refused(
                arguments,
                quote!(
                    async fn work() -> Result<()> {
                        Ok(())
                    }
                ),
                message,
            );
        }
    }
}
