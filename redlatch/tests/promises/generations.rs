//! An owner that loses a lock and acquires it again: its earlier steps never touch the later hold.
