//! Shared code of the system tests. Next: `relay.rs` (a network with injected faults), `system/main.rs`.
use std::path::{Path, PathBuf};

pub mod relay;

/// The root of the repository that these tests belong to.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package sits one folder below the root").to_path_buf()
}
