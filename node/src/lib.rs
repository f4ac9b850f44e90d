//! The shell of a node: the network, devices and disk around `node_core`, plus the commands and the HTTP API.
//!
//! Start with `node` (assembles a node), `driver` and `shell` (the loop around the core), then `handle` (what the API
//! and the commands use). Next: `node.rs`.
pub mod admission;
pub mod api;
pub mod api_key;
pub mod bans;
pub mod boundary;
pub mod bulk;
mod calendar;
pub mod cli;
pub mod client;
pub mod cluster;
pub mod config;
pub mod demo;
pub mod device;
pub mod device_thread;
mod directory;
pub mod disk;
pub mod doctor;
pub mod driver;
pub mod folders;
pub mod handle;
pub mod hub;
pub mod links;
pub mod measure;
pub mod node;
pub mod output;
pub mod private;
pub mod process;
pub mod pull;
mod quiet;
pub mod record;
pub mod renewal;
pub mod residency;
pub mod shell;
pub mod states;
pub mod store;
pub mod submissions;
pub mod telemetry;
pub mod tensors;
pub mod transfer;
pub mod views;
pub mod vital;

// Planted bugs are for the simulator's tests; a program that contains any must not compile.
const _: () =
    assert!(!node_core::PLANTED, "node-core was built with the feature `planted`, which only simnet may turn on");
