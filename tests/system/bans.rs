//! A member that is thrown out: by everybody, for good, and those it brought along with it.
use crate::harness::{Mesh, meshnode};
use serde_json::json;
use std::time::{Duration, Instant};

fn ticket_of(mesh: &Mesh, node: usize) -> String {
    let answer = mesh.nodes[node].post("/api/v1/invite", &json!({"ttl_s": 600, "uses": 2})).expect("an invitation");
    answer["ticket"].as_str().expect("a ticket").to_owned()
}

#[test]
fn the_banned_are_out_for_everybody_and_stay_out() {
    let mut mesh = Mesh::new();
    for name in ["first", "second", "third", "culprit"] {
        mesh.start(name, None);
    }
    let ticket = ticket_of(&mesh, 3);
    mesh.join("guest-of-culprit", &ticket);
    mesh.wait_members(5, Duration::from_secs(30));
    // Away when the ban is said, so that it has to be told later.
    mesh.nodes[2].kill();
    for node in [0, 1, 3, 4] {
        mesh.nodes[node].wait_members(4, Duration::from_secs(10)).expect("the dead node disappears");
    }

    // Who let whom in is known from the certificates of those one is connected to.
    let guest_is_known = |state: &serde_json::Value| {
        let known = |p: &serde_json::Value| p["name"] == "guest-of-culprit" && p["connected"] == true;
        state["peers"].as_array().is_some_and(|peers| peers.iter().any(known))
    };
    mesh.nodes[1].wait_state(Duration::from_secs(30), guest_is_known).expect("connected to the guest");

    // Not by the founder, and by name.
    let output = std::process::Command::new(meshnode())
        .args(["ban", "culprit", "--json", "--api", &mesh.nodes[1].api.to_string()])
        .output()
        .expect("the command runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let answer: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert!(answer["banned"].as_str().is_some_and(|peer| peer.starts_with("12D3")), "{answer}");
    assert_eq!(answer["with_it"].as_array().map(Vec::len), Some(1), "{answer}");

    let banned_at = Instant::now();
    for node in [0, 1] {
        mesh.nodes[node].wait_members(2, Duration::from_secs(30)).expect("the banned is out, and its guest");
    }
    eprintln!("out for everybody after {:?}", banned_at.elapsed());
    // Beyond the time in which the old key still opens: those who stay hear each other under the new one.
    std::thread::sleep(Duration::from_secs(13));
    for node in [0, 1] {
        mesh.nodes[node].wait_members(2, Duration::from_secs(1)).expect("those who stay see each other");
    }

    // The one that was away is told when it comes back, and gets the new key.
    mesh.restart(2);
    for node in [0, 1, 2] {
        mesh.nodes[node].wait_members(3, Duration::from_secs(30)).expect("who was away comes back");
    }
    // A newcomer is told the new key by whoever lets it in.
    let ticket = ticket_of(&mesh, 1);
    mesh.join("newcomer", &ticket);
    for node in [0, 1, 2, 5] {
        mesh.nodes[node].wait_members(4, Duration::from_secs(30)).expect("a newcomer is heard");
    }

    // The banned comes back under its key: nobody talks to it. (Its guest is banned too, and would: they share the old key.)
    mesh.nodes[4].kill();
    mesh.nodes[3].kill();
    mesh.restart(3);
    std::thread::sleep(Duration::from_secs(3));
    let alone = mesh.nodes[3].wait_members(1, Duration::from_secs(1)).expect("it is alone");
    assert_eq!(alone["peers"].as_array().map_or(0, |peers| peers.iter().filter(|p| p["state"] == "alive").count()), 1);
    // And a whole restart of a member does not forget it.
    mesh.nodes[1].kill();
    mesh.restart(1);
    for node in [0, 1, 2, 5] {
        mesh.nodes[node].wait_members(4, Duration::from_secs(30)).expect("all but the banned and its guest");
    }
}
