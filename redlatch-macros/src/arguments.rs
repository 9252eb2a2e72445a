//! The arguments of the attribute.

use std::time::Duration;

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens as _, quote};
use syn::ext::IdentExt as _;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, ExprLit, Lit, Result, Token};

/// All arguments, in the order of [`Arguments::parse`].
const NAMES: [&str; 6] = ["client", "name", "kind", "lease", "wait", "or"];

/// The arguments, as code.
pub(crate) struct Arguments {
    /// The handle of the lock.
    pub(crate) handle: TokenStream,
    /// The lease, of type `Duration`.
    pub(crate) lease: Option<TokenStream>,
    /// How long to wait, of type `Duration`, and the value to return after that.
    pub(crate) limit: Option<(TokenStream, Expr)>,
}

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> Result<Arguments> {
        let [client, name, kind, lease, wait, or] = values(input)?;
        let missing = |message| Error::new(Span::call_site(), message);
        let client = client.ok_or_else(|| {
            missing("`locked` needs a client, as in `client = self.locks` or `client = locks`")
        })?;
        let name = name.ok_or_else(|| {
            missing("`locked` needs the name of the lock, as in `name = \"order:{id}\"`")
        })?;
        let limit = match (wait, or) {
            (Some(wait), Some(or)) => Some((duration(&wait)?, or)),
            (None, None) => None,
            (Some(wait), None) => {
                return Err(Error::new_spanned(
                    wait,
                    "`wait` needs `or`, the value to return if another owner still holds the lock, as in \
                     `or = Err(OrderError::Busy)`",
                ));
            }
            (None, Some(or)) => {
                return Err(Error::new_spanned(
                    or,
                    "`or` needs `wait`, because the function waits without a limit otherwise; \
                     `wait = \"0s\"` makes one attempt",
                ));
            }
        };
        Ok(Arguments {
            handle: handle(&client, &name, kind.as_ref())?,
            lease: lease.as_ref().map(duration).transpose()?,
            limit,
        })
    }
}

/// Returns the value of each argument in [`NAMES`].
fn values(input: ParseStream<'_>) -> Result<[Option<Expr>; NAMES.len()]> {
    let mut values = [const { None }; NAMES.len()];
    while !input.is_empty() {
        let argument = Ident::parse_any(input)?;
        let Some(index) = NAMES.iter().position(|name| argument == name) else {
            let known = NAMES.map(|name| format!("`{name}`")).join(", ");
            let message = format!("unknown argument `{argument}`; the arguments are {known}");
            return Err(Error::new_spanned(argument, message));
        };
        if values[index].is_some() {
            let message = format!("the argument `{argument}` is given twice");
            return Err(Error::new_spanned(argument, message));
        }
        input.parse::<Token![=]>()?;
        values[index] = Some(input.parse()?);
        if !input.is_empty() {
            input.parse::<Token![,]>()?;
        }
    }
    Ok(values)
}

/// Returns the code that creates the handle.
fn handle(client: &Expr, name: &Expr, kind: Option<&Expr>) -> Result<TokenStream> {
    let name = match text(name) {
        Some(format) => quote!(::std::format!(#format)),
        None => name.to_token_stream(),
    };
    let name = quote!(::core::convert::AsRef::<str>::as_ref(&#name));
    let ident = match kind.map(ungrouped) {
        Some(Expr::Path(path)) => path.path.get_ident().map(Ident::to_string),
        _ => None,
    };
    let handle = match (kind, ident.as_deref()) {
        (None, _) => quote!(lock(#name)),
        (_, Some("fair")) => quote!(fair_lock(#name)),
        (_, Some("fenced")) => quote!(fenced_lock(#name)),
        (_, Some("spin")) => quote!(spin_lock(#name)),
        (_, Some("read")) => quote!(read_write_lock(#name).read()),
        (_, Some("write")) => quote!(read_write_lock(#name).write()),
        (kind, _) => {
            return Err(Error::new_spanned(
                kind,
                "unknown kind of lock; use `fair`, `fenced`, `spin`, `read` or `write`, or leave out `kind`",
            ));
        }
    };
    Ok(quote!((#client).#handle))
}

/// Returns the expression within parentheses, or from a variable of another macro.
fn ungrouped(expression: &Expr) -> &Expr {
    match expression {
        Expr::Group(group) => ungrouped(&group.expr),
        Expr::Paren(paren) => ungrouped(&paren.expr),
        other => other,
    }
}

/// Returns the literal, if the expression is a string literal.
fn text(expression: &Expr) -> Option<&syn::LitStr> {
    match ungrouped(expression) {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) => Some(text),
        _ => None,
    }
}

/// Returns an expression of type `Duration`: that of a text such as `"2s"`, or the expression itself.
fn duration(expression: &Expr) -> Result<TokenStream> {
    let Some(literal) = text(expression) else {
        return Ok(expression.to_token_stream());
    };
    let Some(duration) = parse_duration(&literal.value()) else {
        return Err(Error::new_spanned(
            literal,
            "invalid duration; use a whole number and a unit, such as \"300ms\", \"2s\", \"5m\", \"1h\" or \"1d\", \
             or an expression of type `Duration`",
        ));
    };
    let (seconds, nanos) = (duration.as_secs(), duration.subsec_nanos());
    Ok(quote!(::core::time::Duration::new(#seconds, #nanos)))
}

/// Parses a duration as the command `redlatch` does, but requires a unit.
fn parse_duration(text: &str) -> Option<Duration> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit_at);
    let number: u64 = number.parse().ok()?;
    let seconds_per: u64 = match unit {
        "ms" => return Some(Duration::from_millis(number)),
        "s" => 1,
        "m" | "min" => 60,
        "h" => 60 * 60,
        "d" => 24 * 60 * 60,
        _ => return None,
    };
    number.checked_mul(seconds_per).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    use super::*;

    #[test]
    fn durations_consist_of_number_and_unit() {
        for (text, millis) in [
            ("0s", 0),
            ("300ms", 300),
            ("2s", 2_000),
            ("5m", 300_000),
            ("5min", 300_000),
            ("1h", 3_600_000),
            ("1d", 86_400_000),
        ] {
            let parsed = parse_duration(text);
            assert_eq!(parsed, Some(Duration::from_millis(millis)), "{text}");
        }
        for text in [
            "",
            "5",
            "s",
            "-5s",
            "1.5s",
            "5 s",
            "5w",
            "18446744073709551615h",
        ] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    /// Locks of several kinds have the same data, so tests of the library cannot tell them all apart.
    #[test]
    fn kind_chooses_the_handle() {
        let handle = |kind: Option<Expr>| {
            let name = parse_quote!(name);
            let handle = handle(&parse_quote!(client), &name, kind.as_ref());
            handle.unwrap().to_string().replace(' ', "")
        };
        let name = "::core::convert::AsRef::<str>::as_ref(&name)";
        assert_eq!(handle(None), format!("(client).lock({name})"));
        for (kind, method, side) in [
            (parse_quote!(fair), "fair_lock", ""),
            (parse_quote!(fenced), "fenced_lock", ""),
            (parse_quote!(spin), "spin_lock", ""),
            (parse_quote!(read), "read_write_lock", ".read()"),
            (parse_quote!(write), "read_write_lock", ".write()"),
        ] {
            let expected = format!("(client).{method}({name}){side}");
            assert_eq!(handle(Some(kind)), expected);
        }
    }
}
