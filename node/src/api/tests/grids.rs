//! Tests of the simulation endpoints: submissions, reports, pictures, streams and cancellation.
use super::*;
use crate::report::{Role, RunState, SimulationReport};
use crate::states::StateName;
use crate::submissions::testing::{Bench, ME, SIZE, ended, heat, placed, rows, steps, values};
use crate::views::{PeerView, Views, hex};
use data_encoding::BASE64;
use node_core::id::{Epoch, JobId, NodeId, PartId};
use node_core::input::Input;
use node_core::work::steps::{SaveKind, StepsEvent};
use node_core::work::{Ending, HeldPart, HeldWork};

mod bodies;

/// A node that runs simulations.
struct Grids {
    bench: Bench,
    server: Server,
    /// The folder of the data directory and of the results.
    home: tempfile::TempDir,
}

/// A header without a key.
const NO_KEY: &str = "Authorization: \r\n";

fn grids() -> Grids {
    grids_of(Bench::new(), None)
}

fn grids_of(bench: Bench, key: Option<&str>) -> Grids {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("results")).unwrap();
    let folders = Folders::new(&home.path().join("data"), vec![home.path().join("results")]);
    let engine = FakeNode { simulations: Some(bench.all.clone()), ..FakeNode::generating("") };
    let server = start_with(engine, key, folders);
    Grids { bench, server, home }
}

/// A packed simulation as a field of a body.
fn packed() -> String {
    BASE64.encode(&heat(100).to_bytes())
}

impl Grids {
    fn submit(&self) -> JobId {
        let (status, answer) = self.server.post("/api/v1/grids", json!({"simulation": packed()}));
        assert_eq!(status, 200, "{answer}");
        job_of(&answer)
    }

    /// A submission whose tiles run.
    fn running(&self) -> JobId {
        let job = self.submit();
        self.bench.all.handle_event(&placed(job, ME, &[rows(0, SIZE[1])]));
        self.bench.all.handle_event(&steps(job, StepsEvent::Runs { step: 0 }));
        job
    }

    /// Ends a simulation, and waits until the end is visible.
    fn end(&self, job: JobId, ending: Ending) {
        self.bench.all.handle_event(&ended(job, ending));
        let submission = self.bench.all.find(job).unwrap();
        wait_until(|| submission.told().ended.is_some());
    }

    /// A picture for live viewers.
    fn paint(&self, job: JobId, step: u32) {
        let name = StateName { job, part: PartId(0), step, kind: SaveKind::Output(1) };
        self.bench.deliver(name, values(SIZE[0] * SIZE[1], step as f32)).unwrap();
    }

    fn report(&self, job: &str) -> SimulationReport {
        let (status, _, body) = self.server.call(&format!("GET /api/v1/grids/{job}"), "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }

    fn list(&self) -> Vec<SimulationReport> {
        serde_json::from_str(&self.server.call("GET /api/v1/grids", "").2).unwrap()
    }

    /// Status and error of a call.
    fn error(&self, head: &str) -> (u16, Value) {
        let (status, _, body) = self.server.call(head, "");
        let body: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
        (status, body["error"].clone())
    }

    /// The jobs that the core was requested to end.
    fn ends(&self) -> Vec<JobId> {
        let job = |input: Input| if let Input::End { job } = input { Some(job) } else { None };
        self.bench.inputs().into_iter().filter_map(job).collect()
    }
}

fn job_of(answer: &Value) -> JobId {
    JobId(u64::from_str_radix(answer["job"].as_str().unwrap(), 16).unwrap())
}

fn id(job: JobId) -> String {
    format!("{:016x}", job.0)
}

/// A tile of a simulation that another node coordinates.
fn held(job: JobId, step: u32) -> HeldPart {
    let epoch = Epoch { counter: 1, issuer: NodeId([2; 16]) };
    let what = HeldWork::Tile { step, steps: 100 };
    HeldPart {
        job,
        name: "plate".into(),
        epoch,
        part: PartId(0),
        device: 0,
        standby: false,
        bytes: Some(9),
        ram: 0,
        what,
    }
}

#[test]
fn a_submission_is_answered_with_its_job_and_listed() {
    let grids = grids();
    let (status, answer) = grids.server.post("/api/v1/grids", json!({"simulation": packed()}));
    assert_eq!((status, &answer["from_step"]), (200, &json!(0)));
    let job = answer["job"].as_str().unwrap();
    assert!(job.len() == 16 && job.bytes().all(|byte| byte.is_ascii_hexdigit()), "{job}");
    let listed = grids.list();
    assert_eq!(listed.iter().map(SimulationReport::job).collect::<Vec<_>>(), [job]);
    assert_eq!(
        (listed[0].name(), listed[0].state(), listed[0].role()),
        ("plate", RunState::Starting, Role::Coordinator)
    );
    assert!(grids.bench.inputs().iter().any(|input| matches!(input, Input::Start { .. })));
}

#[test]
fn a_report_follows_the_run_to_its_end() {
    let grids = grids();
    let job = grids.running();
    let report = grids.report(&id(job));
    assert_eq!(
        (report.state(), report.step(), report.steps(), report.tiles()),
        (RunState::Running, Some(0), Some(100), 1)
    );
    grids.bench.all.handle_event(&steps(job, StepsEvent::Waiting { reason: "the disk is full".into() }));
    let report = grids.report(&id(job));
    assert_eq!((report.state(), report.waiting()), (RunState::Waiting, Some("the disk is full")));
    grids.end(job, Ending::Completed);
    let report = grids.report(&id(job));
    assert_eq!(
        (report.state(), report.error(), report.coordinator().unwrap().node.as_str()),
        (RunState::Done, None, hex(&ME).as_str())
    );
}

#[test]
fn a_failed_run_says_why() {
    let grids = grids();
    let job = grids.running();
    grids.end(job, Ending::Failed("no node has the memory".into()));
    let report = grids.report(&id(job));
    assert_eq!((report.state(), report.error()), (RunState::Failed, Some("no node has the memory")));
}

#[test]
fn a_report_has_the_keys_that_pages_and_programs_read() {
    let grids = grids();
    let job = grids.running();
    let report: Value =
        serde_json::from_str(&grids.server.call(&format!("GET /api/v1/grids/{}", id(job)), "").2).unwrap();
    for key in
        ["job", "name", "rule", "size", "state", "step", "steps", "mlups", "tiles", "role", "picture", "checkpoint"]
    {
        assert!(report.get(key).is_some(), "{key}: {report}");
    }
    assert_eq!((&report["size"], &report["rule"], &report["picture"]), (&json!(SIZE), &json!("heat"), &Value::Null));
    assert_eq!(report["tiles"][0]["to"], json!([SIZE[0], SIZE[1], 1]));
    grids.paint(job, 10);
    let report: Value =
        serde_json::from_str(&grids.server.call(&format!("GET /api/v1/grids/{}", id(job)), "").2).unwrap();
    assert_eq!((&report["picture"]["step"], &report["picture"]["quantity"]), (&json!(10), &json!("temperature")));
}

#[test]
fn a_simulation_is_found_by_a_prefix_in_either_case() {
    let grids = grids();
    let job = id(grids.submit());
    assert_eq!(grids.report(&job[..1]).job(), job);
    assert_eq!(grids.report(&job.to_ascii_uppercase()).job(), job);
}

#[test]
fn unknown_simulations_are_not_found_by_any_endpoint() {
    let grids = grids();
    let other = id(JobId(grids.submit().0 ^ 1));
    for job in [other.as_str(), "xyz", "00000000000000000", "-1"] {
        for route in ["GET {job}", "GET {job}/picture", "GET {job}/text", "GET {job}/events", "DELETE {job}"] {
            let route = route.replace("{job}", &format!("/api/v1/grids/{job}"));
            let (status, error) = grids.error(&route);
            assert_eq!((status, &error["code"]), (404, &json!("unknown_job")), "{route}: {error}");
        }
    }
    assert!(grids.ends().is_empty());
}

#[test]
fn a_node_without_simulations_says_so() {
    let server = start(FakeNode::generating(""));
    for route in ["GET /api/v1/grids", "GET /api/v1/grids/12", "GET /api/v1/grids/12/events", "DELETE /api/v1/grids/12"]
    {
        let (status, _, body) = server.call(route, "");
        assert!(status == 404 && body.contains("no_simulations"), "{route}: {status} {body}");
    }
    let (status, answer) = server.post("/api/v1/grids", json!({"simulation": packed()}));
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("no_simulations")));
}

#[test]
fn a_simulation_can_be_cancelled_until_it_has_ended() {
    let grids = grids();
    let job = grids.running();
    let cancel = format!("DELETE /api/v1/grids/{}", id(job));
    for _ in 0..2 {
        let (status, _, body) = grids.server.call(&cancel, "");
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, answer), (200, json!({"job": id(job), "cancelled": true})));
    }
    assert_eq!(grids.ends(), [job; 2], "the core ends it once");
    grids.end(job, Ending::Cancelled);
    let (status, error) = grids.error(&cancel);
    assert_eq!((status, &error["code"]), (409, &json!("job_over")));
    assert!(error["message"].as_str().unwrap().contains("it was cancelled"), "{error}");
    assert_eq!(grids.ends().len(), 2);
    assert_eq!(grids.report(&id(job)).state(), RunState::Cancelled);
}

#[test]
fn a_finished_simulation_cannot_be_cancelled() {
    let grids = grids();
    let job = grids.running();
    grids.end(job, Ending::Completed);
    let (status, error) = grids.error(&format!("DELETE /api/v1/grids/{}", id(job)));
    assert!(status == 409 && error["message"].as_str().unwrap().contains("it is done"), "{error}");
    assert_eq!(grids.report(&id(job)).state(), RunState::Done);
    assert!(grids.ends().is_empty());
}

#[test]
fn without_the_key_simulations_can_be_watched_but_neither_begun_nor_ended() {
    let grids = grids();
    let job = id(grids.running());
    let begun = grids.bench.inputs().len();
    let body = json!({"simulation": packed()}).to_string();
    assert_eq!(grids.server.call(&format!("POST /api/v1/grids\r\n{NO_KEY}"), &body).0, 401);
    assert_eq!(grids.server.call(&format!("DELETE /api/v1/grids/{job}\r\n{NO_KEY}"), "").0, 401);
    for route in ["GET /api/v1/grids", &format!("GET /api/v1/grids/{job}"), &format!("GET /watch/{job}")] {
        assert_eq!(grids.server.call(&format!("{route}\r\n{NO_KEY}"), "").0, 200, "{route}");
    }
    assert_eq!((grids.bench.inputs().len(), grids.list().len()), (begun, 1));
}

#[test]
fn with_a_key_for_all_callers_watching_requires_it() {
    let grids = grids_of(Bench::new(), Some("k"));
    let job = id(grids.running());
    for route in ["", "/picture", "/text", "/events"] {
        let route = format!("GET /api/v1/grids/{job}{route}");
        assert_eq!(grids.server.call(&format!("{route}\r\n{NO_KEY}"), "").0, 401, "{route}");
    }
    let keyed = format!("GET /api/v1/grids/{job}\r\nAuthorization: Bearer k\r\n");
    assert_eq!(grids.server.call(&keyed, "").0, 200);
}

#[test]
fn there_is_no_picture_before_the_first_one() {
    let grids = grids();
    let job = id(grids.running());
    for what in ["picture", "text"] {
        let (status, error) = grids.error(&format!("GET /api/v1/grids/{job}/{what}"));
        assert_eq!((status, &error["code"]), (404, &json!("no_picture_yet")), "{what}");
    }
}

#[test]
fn a_picture_is_a_png_with_its_step() {
    let grids = grids();
    let job = grids.running();
    grids.paint(job, 30);
    let mut answer = Vec::new();
    grids.server.send(&format!("GET /api/v1/grids/{}/picture", id(job)), "").read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_ascii_lowercase();
    for header in ["200 ok", "content-type: image/png", "x-step: 30", "cache-control: no-store"] {
        assert!(head.contains(header), "{header}: {head}");
    }
    assert!(answer[end + 4..].starts_with(b"\x89PNG\r\n\x1a\n"));
}

#[test]
fn the_picture_as_text_fits_the_screen() {
    let grids = grids();
    let job = grids.running();
    grids.paint(job, 30);
    let text = |query: &str| {
        let (status, head, text) = grids.server.call(&format!("GET /api/v1/grids/{}/text{query}", id(job)), "");
        assert!(status == 200 && head.contains("x-step: 30") && head.contains("text/plain"), "{head}");
        (text.lines().next().unwrap().matches('▀').count(), text.lines().count())
    };
    for (query, columns, lines) in [("", 80, 24), ("?columns=16&lines=6", 16, 6), ("?columns=0&lines=0", 8, 4)] {
        let (across, down) = text(query);
        assert!((1..=columns).contains(&across) && (1..=lines).contains(&down), "{query}: {across} x {down}");
    }
    assert_eq!(text("?columns=99999999&lines=99999999"), text("?columns=1000&lines=500"));
    for query in ["?columns=-1", "?columns=wide", "?lines=1.5"] {
        assert_eq!(grids.server.call(&format!("GET /api/v1/grids/{}/text{query}", id(job)), "").0, 400, "{query}");
    }
}

/// The reports of an event stream, which has ended.
fn reports(server: &Server, job: &str) -> Vec<SimulationReport> {
    let (status, head, body) = server.call(&format!("GET /api/v1/grids/{job}/events"), "");
    assert!(status == 200 && head.contains("content-type: application/jsonl"), "{head}");
    assert!(body.ends_with('\n'), "whole lines: {body}");
    body.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

#[test]
fn the_stream_of_an_ended_run_is_one_report() {
    let grids = grids();
    for ending in [Ending::Completed, Ending::Cancelled, Ending::Failed("NaN".into())] {
        let job = grids.running();
        grids.end(job, ending.clone());
        let reports = reports(&grids.server, &id(job));
        assert_eq!(reports.len(), 1, "{ending:?}");
        assert!(reports[0].state().is_over(), "{ending:?}");
    }
}

#[test]
fn a_stream_begins_at_once_advances_and_ends_with_the_end() {
    let grids = grids();
    let job = grids.running();
    let mut stream = grids.server.send(&format!("GET /api/v1/grids/{}/events", id(job)), "");
    // The first report arrives although nothing changes.
    let mut begun = Vec::new();
    while !String::from_utf8_lossy(&begun).contains("\"running\"") {
        let mut some = [0; 512];
        let count = stream.read(&mut some).unwrap();
        assert!(count > 0, "the stream ended early");
        begun.extend_from_slice(&some[..count]);
    }
    let reading = std::thread::spawn(move || {
        stream.read_to_end(&mut begun).unwrap();
        String::from_utf8(begun).unwrap()
    });
    for step in 1..=5 {
        grids.bench.all.handle_event(&steps(job, StepsEvent::Progress { step: 10 * step }));
    }
    grids.end(job, Ending::Completed);
    let answer = reading.join().unwrap();
    let body = dechunk(answer.split_once("\r\n\r\n").unwrap().1);
    let reports: Vec<SimulationReport> = body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, before) = reports.split_last().unwrap();
    assert_eq!((last.state(), last.step()), (RunState::Done, Some(50)));
    assert!(!before.is_empty() && before.iter().all(|report| !report.state().is_over()), "{body}");
    assert!(reports.is_sorted_by_key(SimulationReport::step), "{body}");
}

#[test]
fn a_disconnected_viewer_does_not_disturb_others() {
    let grids = grids();
    let job = grids.running();
    let mut gone = grids.server.send(&format!("GET /api/v1/grids/{}/events", id(job)), "");
    gone.read_exact(&mut [0; 64]).unwrap();
    drop(gone);
    grids.bench.all.handle_event(&steps(job, StepsEvent::Progress { step: 10 }));
    grids.end(job, Ending::Completed);
    assert_eq!(reports(&grids.server, &id(job)).len(), 1);
    assert!(grids.ends().is_empty(), "a viewer does not end a simulation");
}

#[test]
fn a_holder_of_tiles_reports_them_if_the_coordinator_does_not_answer() {
    let grids = grids();
    let job = JobId(0xabcd);
    let peers = vec![PeerView { node: hex(&NodeId([2; 16])), name: "b".into(), ..PeerView::default() }];
    *grids.bench.views.lock() = Views { peers, tiles: vec![held(job, 40)], ..Views::default() };
    let report = grids.report(&id(job));
    assert!(matches!(report, SimulationReport::Held(_)), "{report:?}");
    assert_eq!((report.state(), report.role(), report.step()), (RunState::Computing, Role::Owner, Some(40)));
    assert_eq!(grids.list().iter().map(SimulationReport::job).collect::<Vec<_>>(), [id(job)]);
    let (status, error) = grids.error(&format!("DELETE /api/v1/grids/{}", id(job)));
    assert_eq!(status, 409, "{error}");
    assert!(error["message"].as_str().unwrap().starts_with("b coordinates the simulation"), "{error}");
    let (status, error) = grids.error(&format!("GET /api/v1/grids/{}/picture", id(job)));
    assert_eq!((status, &error["code"]), (404, &json!("unknown_job")), "only its coordinator has pictures");
    assert!(grids.ends().is_empty());
}

#[test]
fn a_run_of_before_a_restart_is_listed_as_lost() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("simulations")).unwrap();
    let entry = json!([{"job": id(JobId(0x77)), "name": "plate", "out": null}]);
    std::fs::write(folder.path().join("simulations/submitted.json"), entry.to_string()).unwrap();
    let grids = grids_of(Bench::in_folder(folder), None);
    let listed = grids.list();
    let [SimulationReport::Lost(lost)] = listed.as_slice() else { panic!("{listed:?}") };
    assert_eq!((lost.job.as_str(), lost.state, lost.role), (id(JobId(0x77)).as_str(), RunState::Lost, Role::Submitter));
    assert!(lost.error.contains("no checkpoint"), "{}", lost.error);
}

#[test]
fn pages_load_nothing_from_other_sites() {
    let grids = grids();
    for page in ["/", "/watch/0123456789abcdef", "/watch/anything"] {
        let (status, head, body) = grids.server.call(&format!("GET {page}"), "");
        assert!(status == 200 && head.contains("text/html") && body.contains("<!doctype html>"), "{page}: {head}");
        assert!(head.contains("content-security-policy: default-src 'self'"), "{page}: {head}");
    }
}
