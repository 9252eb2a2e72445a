//! Generates the methods that do nothing but call the async method of the same name. A test
//! compares the two APIs.

/// Implements methods of a type with the fields `inner` and `worker`, or of two such types.
/// Each line is one method:
///
/// - `get`: returns what the async type returns, without a round trip.
/// - `set`: changes a setting, and returns the handle.
/// - `new`: creates a handle or a request, wrapped like this one.
/// - `run`: runs the async method and blocks until it has returned. Arguments that it borrows are
///   copied first; these are all of them, or none.
macro_rules! forward {
    ([$($impl:tt)*] $link:literal { $($method:tt)* }) => {
        impl $($impl)* {
            $crate::blocking::forward::forward!(@ $link $($method)*);
        }
    };
    ([$($one:tt)*] $of_one:literal, [$($other:tt)*] $of_other:literal { $($method:tt)* }) => {
        $crate::blocking::forward::forward!([$($one)*] $of_one { $($method)* });
        $crate::blocking::forward::forward!([$($other)*] $of_other { $($method)* });
    };
    (@ $link:literal) => {};
    (@ $link:literal get $name:ident($($arg:ident: $type:ty),*) -> $output:ty; $($rest:tt)*) => {
        #[doc = concat!("As [`", $link, "::", stringify!($name), "`].")]
        pub fn $name(&self $(, $arg: $type)*) -> $output {
            self.inner.$name($($arg),*)
        }
        $crate::blocking::forward::forward!(@ $link $($rest)*);
    };
    (@ $link:literal set $name:ident($($arg:ident: $type:ty),*); $($rest:tt)*) => {
        #[doc = concat!("As [`", $link, "::", stringify!($name), "`].")]
        #[must_use]
        pub fn $name(mut self $(, $arg: $type)*) -> Self {
            self.inner = self.inner.$name($($arg),*);
            self
        }
        $crate::blocking::forward::forward!(@ $link $($rest)*);
    };
    (@ $link:literal new $name:ident($($arg:ident: $type:ty),*) -> $output:ty; $($rest:tt)*) => {
        #[doc = concat!("As [`", $link, "::", stringify!($name), "`].")]
        #[must_use]
        pub fn $name(&self $(, $arg: $type)*) -> $output {
            Blocking {
                inner: self.inner.$name($($arg),*),
                worker: self.worker.clone(),
            }
        }
        $crate::blocking::forward::forward!(@ $link $($rest)*);
    };
    (@ $link:literal run $name:ident($($arg:ident: &$type:ty),+) -> $output:ty; $($rest:tt)*) => {
        #[doc = concat!("Runs [`", $link, "::", stringify!($name), "`] and blocks until it has returned. The errors are the same.")]
        pub fn $name(&self $(, $arg: &$type)+) -> Result<$output> {
            let inner = self.inner.clone();
            $(let $arg = $arg.to_owned();)+
            self.worker.run(async move { inner.$name($(&$arg),+).await })?
        }
        $crate::blocking::forward::forward!(@ $link $($rest)*);
    };
    (@ $link:literal run $name:ident($($arg:ident: $type:ty),*) -> $output:ty; $($rest:tt)*) => {
        #[doc = concat!("Runs [`", $link, "::", stringify!($name), "`] and blocks until it has returned. The errors are the same.")]
        pub fn $name(&self $(, $arg: $type)*) -> Result<$output> {
            let inner = self.inner.clone();
            self.worker.run(async move { inner.$name($($arg),*).await })?
        }
        $crate::blocking::forward::forward!(@ $link $($rest)*);
    };
}

pub(super) use forward;
