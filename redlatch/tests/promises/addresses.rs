//! URLs, names and cluster answers: every part of an address is understood or refused.
