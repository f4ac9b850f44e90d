//! The system tests, one module each: what only the whole repository, or real processes, can show.
mod arrows;
