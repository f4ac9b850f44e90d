//! A banned member: rejected by all members, permanently, together with the members it certified.
use crate::harness::{JOIN_MAX, Mesh, meshnode};
use meshnode::cluster::{LocalNode, LocalNodeOptions, free_port};
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn ticket_of(mesh: &Mesh, node: usize) -> String {
    let answer = mesh.nodes[node].post("/api/v1/invite", &json!({"ttl_s": 600, "uses": 2})).expect("an invitation");
    answer["ticket"].as_str().expect("a ticket").to_owned()
}

/// Runs a command to its end; returns its exit code and its output.
fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().expect("the node program runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// `meshnode join` with this data directory.
fn join_again(data_dir: &Path, ticket: &str) -> (Option<i32>, String) {
    let mut command = Command::new("timeout");
    command.arg("20").arg(meshnode()).args(["join", ticket, "--no-mdns", "--listen", "127.0.0.1", "--device", "cpu"]);
    run(command.args(["--port", "0", "--api", "127.0.0.1:0", "--data-dir"]).arg(data_dir))
}

/// Starts a node with the data directory of a stopped one.
fn start_again(stopped: &LocalNode, join: Option<String>) -> LocalNode {
    let options =
        LocalNodeOptions { name: stopped.name.clone(), threads: Some(1), join, ..LocalNodeOptions::default() };
    let dir = stopped.data_dir.parent().expect("the mesh's folder");
    LocalNode::spawn_on(meshnode(), dir, &options, free_port().expect("a port")).expect("the node starts")
}

#[test]
fn a_ban_reaches_all_members_and_persists() {
    let mut mesh = Mesh::new();
    for name in ["first", "second", "third", "culprit"] {
        mesh.start(name, None);
    }
    let ticket = ticket_of(&mesh, 3);
    mesh.join("guest-of-culprit", &ticket);
    mesh.wait_members(5);
    // Down during the ban, so that it has to learn of it later.
    mesh.nodes[2].kill();
    for node in [0, 1, 3, 4] {
        mesh.nodes[node].wait_members(4, JOIN_MAX).expect("the dead node disappears");
    }

    // A node learns who certified a member from the certificate chains of its connections.
    let guest_is_known = |state: &serde_json::Value| {
        let known = |p: &serde_json::Value| p["name"] == "guest-of-culprit" && p["connected"] == true;
        state["peers"].as_array().is_some_and(|peers| peers.iter().any(known))
    };
    mesh.nodes[1].wait_state(JOIN_MAX, guest_is_known).expect("connected to the guest");

    // The ban is issued by a member other than the founder, and by name.
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
        mesh.nodes[node].wait_members(2, JOIN_MAX).expect("the banned member and its guest are gone");
    }
    eprintln!("gone from all members after {:?}", banned_at.elapsed());
    // Longer than the old key is accepted for decryption: the remaining members then communicate under the new key.
    std::thread::sleep(Duration::from_secs(13));
    for node in [0, 1] {
        mesh.nodes[node].wait_members(2, Duration::from_secs(1)).expect("the remaining members see each other");
    }

    // The node that was down learns of the ban when it is back, and receives the new key.
    mesh.restart(2);
    for node in [0, 1, 2] {
        mesh.nodes[node].wait_members(3, JOIN_MAX).expect("the node that was down is back");
    }
    // A new member receives the new key from its inviter.
    let ticket = ticket_of(&mesh, 1);
    mesh.join("newcomer", &ticket);
    for node in [0, 1, 2, 5] {
        mesh.nodes[node].wait_members(4, JOIN_MAX).expect("all see the new member");
    }

    // Other members list the banned node as banned, with its name.
    let shown = |state: &serde_json::Value| {
        let banned = |p: &serde_json::Value| p["name"] == "culprit" && p["state"] == "banned";
        state["peers"].as_array().is_some_and(|peers| peers.iter().any(banned))
    };
    mesh.nodes[1].wait_state(JOIN_MAX, shown).expect("`peers` shows the banned member");

    // The banned node reports which node banned it and what to do, and so does its guest.
    let notice_contains = |part: &'static str| {
        move |state: &serde_json::Value| state["banned"].as_str().is_some_and(|notice| notice.contains(part))
    };
    mesh.nodes[3].wait_state(JOIN_MAX, notice_contains("by second")).expect("the banned node reports the ban");
    mesh.nodes[4]
        .wait_state(JOIN_MAX, notice_contains("culprit, which its membership"))
        .expect("its guest reports the ban");
    mesh.nodes[4].kill();
    mesh.nodes[3].kill();

    // A new ticket does not help with the banned key. The reason is reported immediately, instead of advice about the
    // network.
    let ticket = ticket_of(&mesh, 0);
    let (code, said) = join_again(&mesh.nodes[3].data_dir, &ticket);
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("this node was banned from mesh") && said.contains("by second"), "{said}");
    assert!(said.contains("--data-dir NEW"), "{said}");
    // The banned node can be started alone. It offers no ticket for the mesh that it was banned from, and reports why
    // it is alone.
    let culprit = start_again(&mesh.nodes[3], None);
    assert_eq!(culprit.ticket, "");
    culprit.wait_members(1, JOIN_MAX).expect("the banned node is alone");
    for command in ["status", "peers"] {
        let (code, said) = run(Command::new(meshnode()).args([command, "--api", &culprit.api.to_string()]));
        assert!(code == Some(0) && said.contains("this node was banned"), "{command}: {said}");
    }
    drop(culprit);
    // Its guest is admitted by another member, with its own key.
    let guest = start_again(&mesh.nodes[4], Some(ticket));
    for node in [0, 1, 2, 5] {
        mesh.nodes[node].wait_members(5, JOIN_MAX).expect("the guest is a member again");
    }
    drop(guest);

    // The ban survives a restart of a member.
    mesh.nodes[1].kill();
    mesh.restart(1);
    for node in [0, 1, 2, 5] {
        mesh.nodes[node].wait_members(4, JOIN_MAX).expect("all but the banned node and its guest");
    }
}
