//! Embeds the build time into the program, which warns if the machine's clock is earlier than that.
use std::time::{SystemTime, UNIX_EPOCH};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=SOURCE_DATE_EPOCH");
    // Reproducible builds set the date themselves.
    let named = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|seconds| seconds.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let built: u64 = named.unwrap_or_else(now);
    println!("cargo::rustc-env=MESHNODE_BUILD_UNIX={built}");
}
