//! Expands the attribute: the function acquires the lock, and then runs its body, as an `async` block, while the lock
//! is held.

use proc_macro2::{Group, Ident, Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned as _;
use syn::visit::{Visit, visit_pat_ident};
use syn::visit_mut::{VisitMut, visit_type_mut};
use syn::{
    Attribute, Error, PatIdent, Receiver, Result, ReturnType, Signature, Type, TypeInfer,
    Visibility,
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
        signature,
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
    // The compiler needs the type of the block for each `?` in it.
    let mut output = Type::clone(returned);
    InferImplTrait.visit_type_mut(&mut output);
    let mut arguments = Bindings::default();
    arguments.visit_signature(&signature);
    let arguments = arguments.0;
    Ok(quote_spanned! {span=>
        #(#attributes)*
        #visibility #signature {
            let request = #handle.#request #lease;
            let guard = match ::core::future::IntoFuture::into_future(request).await {
                ::core::result::Result::Ok(guard) => guard,
                ::core::result::Result::Err(error) => return #failed,
            };
            #refused
            // All arguments are dropped before the lock is released, also those of which the body uses a part or nothing.
            let work = async move {
                #(let _ = &#arguments;)*
                #body
            };
            match ::redlatch::__private::run_and_release::<_, #output, _>(guard, work).await {
                ::core::result::Result::Ok(output) => output,
                ::core::result::Result::Err(error) => #failed,
            }
        }
    })
}

/// The names that the arguments of a function have in its body.
#[derive(Default)]
struct Bindings(Vec<Ident>);

impl Visit<'_> for Bindings {
    fn visit_receiver(&mut self, receiver: &Receiver) {
        self.0.push(receiver.self_token.into());
    }

    fn visit_pat_ident(&mut self, binding: &PatIdent) {
        self.0.push(binding.ident.clone());
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
