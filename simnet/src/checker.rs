//! Invariants of every run: one property per file.

pub mod bounds;
pub mod cancels;
pub mod epochs;
pub mod frames;
pub mod membership;
pub mod owners;
pub mod pauses;
pub mod reports;
pub mod requests;
pub mod rest;
pub mod rings;
pub mod standbys;
pub mod survival;
