//! What it costs short locks that losses are reported at once and that the registry shows who holds them for long: nothing,
//! because both begin a second after an acquisition.

use redlatch::Client;
use redlatch_testkit::Server;
use serde_json::Value;

use crate::Result;
use crate::options::Options;
use crate::pairs::our_round;
use crate::ratio::compare;

pub(crate) const NAME: &str = "visibility_pairs";

const GOAL: f64 = 0.98;

pub(crate) async fn measure(server: &Server, options: &Options) -> Result<Vec<Value>> {
    println!(
        "\n{NAME}: lock + unlock per second on free names, with client tracking and the registry of"
    );
    println!("clients, compared with a client that has neither.");
    println!("  tasks       on/s      off/s   ratio  (quartiles)     goal {GOAL:.2}");
    let url = server.url();
    let on = Client::connect(&url).await?;
    let off = Client::builder().client_tracking(false).registry(false);
    let off = off.connect(&url).await?;
    let mut rows = Vec::new();
    for tasks in [1, 16, 128] {
        let round = |client| move || our_round(client, tasks, options.round);
        let compared = compare(round(&on), round(&off), options.rounds).await?;
        rows.push(compared.report(NAME, tasks, GOAL));
    }
    Ok(rows)
}
