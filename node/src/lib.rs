//! The shell of a node: the real world around `node_core`, and the commands and the HTTP API that people meet.
//!
//! Next: `cli.rs`, what a person can ask for.
pub mod client;
pub mod config;
pub mod pull;
pub mod telemetry;
