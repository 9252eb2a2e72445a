//! Dead waiters of a fair lock delay the living ones by one grace period, not by one wait time each.
