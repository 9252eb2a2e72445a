//! Local queues: waiters of different objects, and of one owner's two sides, do not block each other.
