//! Every scenario in `scenarios/` runs without violations.
#![expect(clippy::print_stdout, reason = "the test prints its measurements")]
use simnet::{Case, run};
use std::path::Path;

#[test]
fn every_scenario_runs_without_violations() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).expect("the folder of scenarios") {
        let path = entry.expect("an entry of it").path();
        let case = Case::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let outcome = run(&case);
        let timeline: Vec<String> = outcome.timeline.iter().map(ToString::to_string).collect();
        assert!(outcome.violations.is_empty(), "{path:?}: {:#?}\n{}", outcome.violations, timeline.join("\n"));
        assert!(
            !case.about.is_empty() && !case.faults.is_empty() && !case.requests.is_empty(),
            "{path:?} needs a description, faults and requests"
        );
        let faults = outcome.timeline.iter().filter(|line| line.what.starts_with("**")).count();
        assert!(faults > case.faults.len(), "{path:?}: all its faults strike, then all are healed");
        println!("{:<28} {:?}, pause {} ms", path.file_name().unwrap().display(), outcome.ends, outcome.pause_ms_max);
        names.push(path);
    }
    assert!(names.len() >= 8, "{names:?}");
}

#[test]
fn a_case_round_trips_through_toml() {
    let case = simnet::soak::draw(5, simnet::soak::Size::default());
    let written = case.to_toml();
    let path = std::env::temp_dir().join(format!("simnet-case-{}.toml", std::process::id()));
    std::fs::write(&path, &written).expect("a temporary file");
    let read = Case::load(&path).unwrap_or_else(|error| panic!("{error}\n{written}"));
    std::fs::remove_file(&path).expect("it is there");
    assert_eq!(read, case);
    assert_eq!(run(&read).trace, run(&case).trace);
}

#[test]
fn errors_in_a_scenario_are_described() {
    for (text, expected) in [
        ("lasts = \"five\"", "expected a time"),
        ("[mesh]\nhosts = 3\n[[fault]]\nat = \"1s\"\ncrash = 3", "names host 3"),
        ("hosts = 3", "unknown field"),
        ("[mesh]\nhosts = 0", "expected 1 to"),
    ] {
        let path = std::env::temp_dir().join(format!("simnet-wrong-{}-{}.toml", std::process::id(), text.len()));
        std::fs::write(&path, text).expect("a temporary file");
        let error = Case::load(&path).expect_err(text).to_string();
        std::fs::remove_file(&path).expect("it is there");
        assert!(error.contains(expected), "{text}: {error}");
    }
}
