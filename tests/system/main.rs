//! The system tests, one module each: what only the whole repository, or real processes, can show.
mod arrows;
mod bans;
mod client;
mod commands;
mod faults;
mod grids;
mod harness;
mod head;
mod joining;
mod mesh;
mod openai;
mod reshape;
mod standby;
mod weights;
