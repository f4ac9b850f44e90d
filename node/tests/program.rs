//! The program itself, without a node: what it says of itself. That this test exists has `cargo test` build the program
//! first, so that the system tests never run an old one.
use std::process::{Command, Output};

fn meshnode(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_meshnode")).args(arguments).output().expect("the program runs")
}

fn stdout(arguments: &[&str]) -> String {
    let output = meshnode(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn it_names_its_version() {
    assert_eq!(stdout(&["--version"]).trim(), concat!("meshnode ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn shells_complete_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&["completions", shell]);
        for command in ["up", "join", "plan", "selftest"] {
            assert!(script.contains(command), "{shell}: no `{command}`");
        }
    }
}

#[test]
fn help_shows_how_a_command_is_used() {
    for command in ["up", "join", "plan", "run", "serve", "bench", "demo"] {
        let help = stdout(&["help", command]);
        assert!(help.contains("Examples:"), "{command}: {help}");
    }
    assert!(stdout(&["run", "--help"]).contains("--activations"));
}

#[test]
fn what_it_does_not_know_is_a_usage_error() {
    let output = meshnode(&["frobnicate"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty(), "stdout is for answers");
}
