//! Wait limits and outage limits: a call returns at its limit, with the error that explains it.
