//! Fencing tokens grow with each acquisition, also after a loss, a restart, or lost data.
