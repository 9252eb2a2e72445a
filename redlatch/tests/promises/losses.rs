//! A client that learns of one loss checks all its holds, and waiters are woken when a hold is gone.
