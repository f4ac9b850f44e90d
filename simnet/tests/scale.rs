//! Large meshes: all live nodes detect all crashes, and the simulator is fast enough.
//!
//! The full size: `SIMNET_NODES=1000 cargo test --release -p simnet --test scale -- --nocapture`
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
use node_core::time::Duration;
use simnet::scale::scale;

#[test]
fn ten_deaths_in_a_large_mesh_are_known_to_all() {
    let nodes = std::env::var("SIMNET_NODES").ok().and_then(|nodes| nodes.parse().ok()).unwrap_or(150);
    let scale = scale(7, nodes, 10, Duration::from_secs(60), |_| {});
    println!("{scale:?}");
    assert_eq!((scale.wrong_views, scale.false_deaths), (0, 0), "{scale:?}");
    assert!(scale.all_know_ms > 0 && scale.all_know_ms < 5_000, "{scale:?}");
}
