//! Thousands of callers that meet a dead, frozen or slow server: each is answered within its limit.
