//! The shell of a node: the network, devices and disk around `node_core`, plus the commands and the HTTP API.
//!
//! Start with `node` (assembles a node), `driver` and `shell` (the loop around the core), then `handle` (what the API
//! and the commands use). Next: `node.rs`.
mod admission;
mod api;
mod api_key;
mod bans;
mod boundary;
mod bulk;
mod calendar;
pub mod cli;
mod client;
mod clock;
pub mod cluster;
pub mod config;
mod demo;
mod device;
mod device_thread;
mod directory;
mod disk;
mod doctor;
mod driver;
mod error;
mod folders;
mod handle;
mod hub;
mod links;
mod measure;
mod metrics;
mod node;
mod output;
mod panics;
mod private;
mod process;
mod pull;
mod quiet;
mod record;
mod regions;
mod renewal;
mod report;
mod residency;
mod rows;
mod shell;
mod states;
mod store;
mod submissions;
mod telemetry;
mod tensors;
mod transfer;
mod views;
mod vital;

// Planted bugs are for the simulator's tests; a program that contains any must not compile.
const _: () =
    assert!(!node_core::PLANTED, "node-core was built with the feature `planted`, which only simnet may turn on");
