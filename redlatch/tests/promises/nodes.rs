//! Clusters with a frozen node: the locks on the other nodes are renewed and released in time.
