//! Admission to a mesh, and the error messages of rejected joins.
use crate::harness::{JOIN_MAX, Mesh, meshnode};
use std::process::Command;
use std::time::Duration;

/// Runs `meshnode join` with this ticket to its end; returns its exit code and stderr.
fn join(ticket: &str) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("timeout");
    command.arg("20").arg(meshnode()).args(["join", ticket, "--no-mdns", "--listen", "127.0.0.1", "--device", "cpu"]);
    command.args(["--port", "0", "--api", "127.0.0.1:0", "--data-dir"]).arg(dir.path());
    let output = command.output().expect("the node program runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn invite(mesh: &Mesh, ttl: &str, uses: &str) -> String {
    let api = mesh.nodes[0].api.to_string();
    let output = Command::new(meshnode())
        .args(["invite", "--ttl", ttl, "--uses", uses, "--api", &api])
        .output()
        .expect("the node program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn invalid_tickets_are_rejected_with_the_reason() {
    let mut mesh = Mesh::new();
    mesh.start("inviter", None);
    let (code, said) = join("mesh1notaticket");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("ticket"), "{said}");

    let expired = invite(&mesh, "1s", "1");
    std::thread::sleep(Duration::from_millis(2100));
    let (code, said) = join(&expired);
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("expired"), "{said}");

    let once = invite(&mesh, "1h", "1");
    mesh.join("first", &once);
    let (code, said) = join(&once);
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("used"), "{said}");
}

/// `--open` admits neighbours without a ticket, but no member vouched for them: they may not invite others.
#[test]
fn an_open_mesh_admits_a_neighbour_that_may_not_invite() {
    let mut mesh = Mesh::new();
    mesh.open("first");
    let address = format!("/ip4/127.0.0.1/tcp/{}", mesh.nodes[0].port);
    mesh.join("neighbour", &address);
    mesh.wait_members(2);
    assert_eq!(mesh.nodes[1].ticket, "");
    let api = mesh.nodes[1].api.to_string();
    let output = Command::new(meshnode()).args(["invite", "--api", &api]).output().expect("the node program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("without the right to invite"), "{said}");
}

/// A member of one mesh does not join another by accident.
#[test]
fn a_ticket_of_another_mesh_is_reported() {
    let mut ours = Mesh::new();
    ours.start("ours", None);
    let mut theirs = Mesh::new();
    theirs.start("theirs", None);
    let foreign = invite(&theirs, "1h", "1");
    let dir = ours.nodes[0].data_dir.clone();
    ours.nodes[0].kill();
    let output = Command::new("timeout")
        .arg("20")
        .arg(meshnode())
        .args(["join", &foreign, "--no-mdns", "--listen", "127.0.0.1", "--device", "cpu", "--port", "0"])
        .args(["--api", "127.0.0.1:0", "--data-dir"])
        .arg(dir)
        .output()
        .expect("the node program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("another mesh"), "{said}");
}

#[test]
fn a_port_in_use_is_reported_with_the_flag() {
    let mut mesh = Mesh::new();
    mesh.start("first", None);
    let port = mesh.nodes[0].port.to_string();
    let dir = tempfile::tempdir().expect("a folder");
    let output = Command::new("timeout")
        .arg("20")
        .arg(meshnode())
        .args(["up", "--no-mdns", "--listen", "127.0.0.1", "--device", "cpu", "--port", &port])
        .args(["--api", "127.0.0.1:0", "--data-dir"])
        .arg(dir.path())
        .output()
        .expect("the node program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains(&port) && said.contains("--port"), "{said}");
}

/// Killed nodes disappear from every member's view; a restarted node is the same member in a new incarnation.
#[test]
fn killed_nodes_disappear_and_restarted_nodes_reappear() {
    let mut mesh = Mesh::new();
    for name in ["a", "b", "c"] {
        mesh.start(name, None);
    }
    mesh.wait_members(3);
    mesh.nodes[2].kill();
    for node in &mesh.nodes[..2] {
        node.wait_members(2, JOIN_MAX).expect("the dead node disappears");
    }
    mesh.restart(2);
    mesh.wait_members(3);
}

/// A web page must not reach the local API through the user's browser.
#[test]
fn a_web_page_cannot_post_to_the_api() {
    let mut mesh = Mesh::new();
    mesh.start("a", None);
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let url = format!("http://{}/api/v1/leave", mesh.nodes[0].api);
    let by_origin = agent.post(&url).header("Origin", "https://evil.example").send_empty().expect("an answer");
    assert_eq!(by_origin.status(), 403);
    let by_host = agent.post(&url).header("Host", "evil.example").send_empty().expect("an answer");
    assert_eq!(by_host.status(), 403);
    assert!(mesh.nodes[0].alive());
}
