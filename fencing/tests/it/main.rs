//! Tests of the recipes in `docs/fencing.md`.

mod faults;
mod http;
mod lost_data;
mod mariadb;
mod page;
mod postgresql;
mod release_order;
mod sqlite;
mod support;
