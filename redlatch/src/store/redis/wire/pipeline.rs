//! The commands of one connection in order, without I/O, lock, task or clock.
//!
//! 1. **The order of bytes in the buffer is the order on the server**, and nothing else decides
//!    what was sent. A command in the buffer counts as sent. A step that waits for its script
//!    (point 3) was never sent.
//! 2. Each command in the buffer has one entry in the queue of expected replies. The first reply
//!    belongs to the first entry. Messages that no command asked for have none. The server confirms
//!    subscriptions with messages, or replies an error. It may also end one by itself, with the
//!    message that confirms an unsubscription, and then refuse the unsubscription. So a command
//!    that has a reply in any case follows each one ([`Expects::End`]).
//! 3. A step whose script can run several steps is sent alone while few steps and commands are in
//!    flight, so that the server works while callers add their steps. Otherwise it waits. When the
//!    buffer is written next, all steps that wait are packed, those of one script as one script.
//!    That is a round. The number of rounds in flight is limited ([`Packing`]), but grows with the
//!    time that a round takes ([`ROUND_TIME`]); a full script starts one in any case. So a slow
//!    network does not slow down many callers. There is no timer. `ClientBuilder::batching(false)`
//!    turns packing off.
//! 4. A caller that goes away takes its step out of the queue of those that wait: it was never
//!    sent. Otherwise it leaves its slot behind, which the reply empties. So what a caller sends
//!    next is behind the step.
//! 5. When the connection ends, all that was sent is unanswered, and what waits was not sent.
//!    Nothing is sent later. Mutants `unanswered-batch-succeeds`,
//!    `rest-of-command-sent-after-reconnect`.
//!
//! What must not happen, and what prevents it:
//!
//! - *A reply in the wrong slot*: callers would hold locks that they do not have. What does not fit
//!   ends the connection: a reply to no command, a script with another number of replies. Mutants
//!   `reply-in-wrong-slot`, `message-taken-for-reply`, `first-reply-answers-whole-batch`.
//! - *A release overtakes the acquisition that it settles.* Point 4. Callers wait for room before
//!   they come here, and releases do not. Mutants `canceled-step-is-sent-later`,
//!   `step-of-batch-counts-as-unsent`.
//! - *A release starves behind full scripts.* A round takes all steps that wait.
//! - *A lease is longer here than in the store.* It counts from when the script was put into the
//!   buffer. Mutant `batch-lease-counts-from-answer`.
//! - *A step fails because of another one.* Scripts catch errors for each step. If the server
//!   refuses a whole script (NOPERM, NOSCRIPT), it has run no step, and each caller sends its own
//!   alone.
//! - *A step follows another one to a node without its keys.* No packing where keys have slots:
//!   while one moves, a server up to 6.2 redirects a script as soon as one of its keys is missing.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::codec::{Cmd, Malformed, malformed, write_header, write_text};
use crate::step::{Batchable, ErrorReply, ScriptReply};

/// When steps wait, and how they are packed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing {
    /// Number of steps and commands in flight at which steps wait. At least 1.
    pub(super) alone: usize,
    /// Number of rounds in flight at which steps wait.
    pub(super) rounds: usize,
    /// The same on a slow network.
    pub(super) most_rounds: usize,
    /// Largest number of steps in a script.
    pub(super) steps: usize,
}

impl Packing {
    pub(super) const fn new(is_written_by_callers: bool) -> Packing {
        Packing {
            // With few callers it is faster if each sends its step at once, so that the server
            // works while they do.
            alone: if is_written_by_callers { 32 } else { 1 },
            // Several, so that the server has work while the client handles the answers to the
            // others.
            rounds: 8,
            most_rounds: 32,
            // Larger scripts save the server little, and neither side has work while it waits for
            // them.
            steps: 16,
        }
    }
}

impl Default for Packing {
    fn default() -> Packing {
        Packing::new(false)
    }
}

/// One more round may be in flight for each of these that the latest one took.
const ROUND_TIME: Duration = Duration::from_millis(1);

/// Where a caller finds its answer.
pub(super) type SlotId = usize;

/// What becomes of a command. The default: it was not sent.
#[derive(Debug, Default)]
pub(in super::super) struct Answered {
    /// `None`: the connection has ended.
    pub(in super::super) reply: Option<ScriptReply>,
    /// When the command was put into the buffer. `None`: it never was.
    pub(in super::super) sent_at: Option<Instant>,
    /// Whether it was in a script with others that the server has refused: it has run none of them.
    pub(in super::super) refused: bool,
}

#[derive(Debug)]
enum Slot {
    Free,
    /// The step waits for its script.
    Waiting,
    Sent(Instant),
    /// The same, and its caller has gone.
    Abandoned,
    Answered(Answered),
}

/// What the server is to send next.
#[derive(Debug)]
enum Expected {
    Reply(SlotId),
    /// Messages of this kind for this number of channels.
    Confirmations {
        slot: SlotId,
        kind: &'static str,
        left: usize,
    },
    /// The reply to [`END`], perhaps behind an error.
    End {
        slot: SlotId,
        error: Option<ErrorReply>,
    },
    /// One reply for each of this number of steps. Their slots are the next ones in `packed`.
    Script {
        steps: usize,
        queue: usize,
        /// Whether it is the last script of its round.
        ends_round: bool,
    },
}

/// The steps of one script that wait.
#[derive(Debug)]
struct ScriptQueue {
    script: &'static Batchable,
    steps: VecDeque<(SlotId, Cmd)>,
    /// Whether the server has the script, as far as is known.
    is_loaded: bool,
}

/// How a command is answered.
#[derive(Debug, Clone, Copy)]
pub(in super::super) enum Expects {
    Reply,
    /// With a message of this kind for each of this number of channels.
    Confirmations(&'static str, usize),
    /// With messages, which may also arrive for other reasons, or an error. The command ends
    /// subscriptions.
    End,
}

/// What is sent behind the end of subscriptions: a command that every user may run, at any time,
/// once more.
const END: &[u8] = b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n";

#[derive(Debug, Default)]
pub(super) struct Pipeline {
    /// What was not written yet: `out[written..]`.
    out: Vec<u8>,
    written: usize,
    slots: Vec<Slot>,
    free: Vec<SlotId>,
    expected: VecDeque<Expected>,
    /// The slots of the steps in scripts, in order.
    packed: VecDeque<SlotId>,
    /// The steps that wait, by script. There are few scripts.
    queues: Vec<ScriptQueue>,
    /// Commands of steps that were packed, whose buffers are used again.
    spare: Vec<Cmd>,
    /// When the rounds in flight began.
    rounds: VecDeque<Instant>,
    /// How many more than [`Packing::rounds`] may be in flight.
    more_rounds: usize,
    /// The slots whose commands are answered, also if their callers have gone, until they are taken
    /// from here.
    pub(super) answered: Vec<SlotId>,
    packing: Packing,
    ended: bool,
}

/// A buffer that is larger than this is freed when it is empty.
const MAX_SPARE_BYTES: usize = 64 * 1024;

/// Number of buffers that are kept for steps that wait: eight rounds of one script.
const MAX_SPARE: usize = 128;

impl Pipeline {
    pub(super) fn new(packing: Packing) -> Pipeline {
        Pipeline {
            packing,
            ..Pipeline::default()
        }
    }

    /// Returns whether nothing is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.expected.is_empty() && self.next_queue(1).is_none()
    }

    /// Puts a command into the buffer. Returns the slot of its answer.
    pub(super) fn send(&mut self, cmd: &Cmd, expects: Expects, now: Instant) -> SlotId {
        if self.ended {
            return self.add_slot(Slot::Answered(Answered::default()));
        }
        let slot = self.add_slot(Slot::Sent(now));
        cmd.write_to(&mut self.out);
        self.expected.push_back(match expects {
            Expects::Confirmations(kind, left) => Expected::Confirmations { slot, kind, left },
            Expects::End => {
                self.out.extend_from_slice(END);
                Expected::End { slot, error: None }
            }
            Expects::Reply => Expected::Reply(slot),
        });
        slot
    }

    /// Puts a step into the buffer, or lets it wait for its script.
    pub(super) fn send_step(
        &mut self,
        cmd: &Cmd,
        script: &'static Batchable,
        now: Instant,
    ) -> SlotId {
        // A script counts once more than its steps.
        let in_flight = self.expected.len() + self.packed.len();
        let is_alone = in_flight < self.packing.alone;
        if is_alone && self.next_queue(1).is_none() || self.ended {
            return self.send(cmd, Expects::Reply, now);
        }
        let slot = self.add_slot(Slot::Waiting);
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.copy_from(cmd);
        let queue = self.queues.iter_mut().find(|queue| queue.script == script);
        match queue {
            Some(queue) => queue.steps.push_back((slot, copy)),
            None => self.queues.push(ScriptQueue {
                script,
                steps: VecDeque::from([(slot, copy)]),
                is_loaded: false,
            }),
        }
        slot
    }

    /// Returns whether there are bytes to write, or steps to pack.
    pub(super) fn has_output(&self) -> bool {
        !self.output().is_empty() || self.next_queue(self.least_steps()).is_some()
    }

    /// Returns the bytes to write.
    pub(super) fn output(&self) -> &[u8] {
        &self.out[self.written..]
    }

    /// Records that the first of these bytes were written.
    pub(super) fn wrote(&mut self, bytes: usize) {
        self.written += bytes;
        if self.written == self.out.len() {
            self.written = 0;
            self.out.clear();
            self.out.shrink_to(MAX_SPARE_BYTES);
        } else if self.written > MAX_SPARE_BYTES.max(self.out.len() / 2) {
            self.out.drain(..self.written);
            self.written = 0;
        }
    }

    /// Returns the number of steps with which a script may start a round.
    fn least_steps(&self) -> usize {
        match self.rounds.len() < self.packing.rounds + self.more_rounds {
            true => 1,
            false => self.packing.steps,
        }
    }

    /// Returns the first queue with this many steps.
    fn next_queue(&self, least: usize) -> Option<usize> {
        let is_due = |queue: &ScriptQueue| queue.steps.len() >= least;
        self.queues.iter().position(is_due)
    }

    /// Packs the steps that wait, as far as scripts may be sent. Calls `packed` with the number of
    /// steps of each script.
    pub(super) fn pack(&mut self, now: Instant, mut packed: impl FnMut(usize)) {
        let expected = self.expected.len();
        let mut least = self.least_steps();
        while let Some(i) = self.next_queue(least) {
            // Else those of a script with few steps could wait for ever behind full ones.
            least = 1;
            let queue = &mut self.queues[i];
            let steps = queue.steps.len().min(self.packing.steps);
            queue.write(steps, &mut self.out);
            self.expected.push_back(Expected::Script {
                steps,
                queue: i,
                ends_round: false,
            });
            for (slot, mut cmd) in queue.steps.drain(..steps) {
                self.slots[slot] = Slot::Sent(now);
                self.packed.push_back(slot);
                if self.spare.len() < MAX_SPARE {
                    cmd.clear();
                    self.spare.push(cmd);
                }
            }
            packed(steps);
        }
        if self.expected.len() > expected
            && let Some(Expected::Script { ends_round, .. }) = self.expected.back_mut()
        {
            *ends_round = true;
            self.rounds.push_back(now);
        }
    }

    /// Handles a reply.
    pub(super) fn receive(&mut self, reply: ScriptReply, now: Instant) -> Result<(), Malformed> {
        match self.expected.pop_front() {
            None => {
                let what = "a reply to no command";
                return Err(match &reply {
                    ScriptReply::Bytes(text) => malformed(what, text),
                    ScriptReply::List(list) => {
                        Malformed::from(format!("{what}: a list of {}", list.len()))
                    }
                    other => malformed(what, format!("{other:?}").as_bytes()),
                });
            }
            Some(Expected::Reply(slot)) => self.answer(slot, Some(reply)),
            Some(Expected::Confirmations { slot, kind, .. }) => match reply {
                ScriptReply::Error(_) => self.answer(slot, Some(reply)),
                reply => {
                    // If it is a confirmation, messages are replies, too, and nothing behind it can
                    // be told from them.
                    let is_message =
                        matches!(&reply, ScriptReply::List(list) if is_of_kind(list, kind));
                    return Err(Malformed {
                        what: "a reply in place of the confirmation of a subscription".to_owned(),
                        is_message,
                    });
                }
            },
            Some(Expected::End { slot, error }) => match (reply, error) {
                (ScriptReply::Error(error), None) => {
                    let error = Some(error);
                    self.expected.push_front(Expected::End { slot, error });
                }
                // Only what HELLO answers: else all later replies would be taken for others.
                (ScriptReply::List(list), error) if is_greeting(&list) => {
                    let reply = error.map_or(ScriptReply::Nil, ScriptReply::Error);
                    self.answer(slot, Some(reply));
                }
                _ => {
                    let reason = "a reply that does not fit behind the end of a subscription";
                    return Err(Malformed::from(reason.to_owned()));
                }
            },
            Some(Expected::Script {
                steps,
                queue,
                ends_round,
            }) => {
                if ends_round && let Some(began) = self.rounds.pop_front() {
                    let took = now.saturating_duration_since(began).as_micros();
                    let more = usize::try_from(took / ROUND_TIME.as_micros()).unwrap_or(usize::MAX);
                    self.more_rounds = more.min(self.packing.most_rounds - self.packing.rounds);
                }
                self.answer_script(steps, queue, reply)?;
            }
        }
        Ok(())
    }

    /// Distributes the replies of a script.
    fn answer_script(
        &mut self,
        steps: usize,
        queue: usize,
        reply: ScriptReply,
    ) -> Result<(), Malformed> {
        let slots: Vec<SlotId> = self.packed.drain(..steps).collect();
        match reply {
            reply if steps == 1 => self.answer(slots[0], Some(reply)),
            ScriptReply::List(replies) if replies.len() == steps => {
                for (slot, reply) in slots.into_iter().zip(replies) {
                    self.answer(slot, Some(reply));
                }
            }
            // None of the steps was executed.
            ScriptReply::Error(error) => {
                if error.code() == "NOSCRIPT" {
                    self.queues[queue].is_loaded = false;
                }
                for slot in slots {
                    self.answer(slot, Some(ScriptReply::Error(error.clone())));
                    if let Slot::Answered(answered) = &mut self.slots[slot] {
                        answered.refused = true;
                    }
                }
            }
            _ => {
                let reason =
                    format!("another number of replies than the {steps} steps in a script");
                return Err(reason.into());
            }
        }
        Ok(())
    }

    /// Handles a message that may be the confirmation of a subscription.
    pub(super) fn confirm(&mut self, message: &[ScriptReply]) {
        let Some(Expected::Confirmations { slot, kind, left }) = self.expected.front_mut() else {
            return;
        };
        if !is_of_kind(message, kind) {
            return;
        }
        *left -= 1;
        if *left == 0 {
            let slot = *slot;
            self.expected.pop_front();
            self.answer(slot, Some(ScriptReply::Nil));
        }
    }

    /// Records a reply. `None`: the connection has ended.
    fn answer(&mut self, slot: SlotId, reply: Option<ScriptReply>) {
        let sent_at = match self.slots[slot] {
            Slot::Sent(at) => Some(at),
            Slot::Waiting if reply.is_none() => None,
            Slot::Abandoned => {
                self.answered.push(slot);
                return self.free(slot);
            }
            Slot::Free | Slot::Waiting | Slot::Answered(_) => {
                debug_assert!(reply.is_none(), "a reply to a command that was not sent");
                return;
            }
        };
        self.answered.push(slot);
        self.slots[slot] = Slot::Answered(Answered {
            reply,
            sent_at,
            refused: false,
        });
    }

    /// Takes the answer, if there is one. Then the slot is free.
    pub(super) fn take(&mut self, slot: SlotId) -> Option<Answered> {
        let Slot::Answered(answered) = &mut self.slots[slot] else {
            return None;
        };
        let answered = std::mem::take(answered);
        self.free(slot);
        Some(answered)
    }

    /// Returns whether a command is still to be answered, or to be sent.
    pub(super) fn is_unanswered(&self, slot: SlotId) -> bool {
        !matches!(self.slots[slot], Slot::Free | Slot::Answered(_))
    }

    /// Handles a caller that does not wait any more. Returns whether its command was never sent.
    pub(super) fn abandon(&mut self, slot: SlotId) -> bool {
        match &self.slots[slot] {
            Slot::Waiting => {
                for queue in &mut self.queues {
                    // Callers mostly give up in the order in which they came.
                    if let Some(at) = queue.steps.iter().position(|(other, _)| *other == slot) {
                        queue.steps.remove(at);
                        break;
                    }
                }
                self.free(slot);
                true
            }
            Slot::Sent(_) => {
                self.slots[slot] = Slot::Abandoned;
                false
            }
            Slot::Answered(answered) => {
                let unsent = answered.sent_at.is_none();
                self.free(slot);
                unsent
            }
            Slot::Free | Slot::Abandoned => false,
        }
    }

    /// Ends the connection: the commands without an answer get none.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.queues.clear();
        self.expected.clear();
        self.packed.clear();
        self.out = Vec::new();
        self.written = 0;
        (0..self.slots.len()).for_each(|slot| self.answer(slot, None));
    }

    fn add_slot(&mut self, slot: Slot) -> SlotId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::Free);
            self.slots.len() - 1
        });
        self.slots[id] = slot;
        id
    }

    fn free(&mut self, slot: SlotId) {
        self.slots[slot] = Slot::Free;
        self.free.push(slot);
    }
}

impl ScriptQueue {
    /// Writes the command that runs the first steps. The first command with a script loads it.
    fn write(&mut self, steps: usize, out: &mut Vec<u8>) {
        let first = self.steps.iter().take(steps).map(|(_, cmd)| cmd);
        if steps == 1 {
            first.for_each(|alone| alone.write_to(out));
            return;
        }
        let script = self.script;
        let keys = script.keys * steps;
        write_header(out, 3 + keys + script.args * steps);
        if std::mem::replace(&mut self.is_loaded, true) {
            write_text(out, b"EVALSHA");
            write_text(out, script.sha().as_bytes());
        } else {
            write_text(out, b"EVAL");
            write_text(out, script.batch_source().as_bytes());
        }
        write_text(out, keys.to_string().as_bytes());
        for cmd in first.clone() {
            out.extend_from_slice(cmd.key_and_arg_bytes().0);
        }
        for cmd in first {
            out.extend_from_slice(cmd.key_and_arg_bytes().1);
        }
    }
}

/// Returns whether this is a message of this kind.
fn is_of_kind(message: &[ScriptReply], kind: &str) -> bool {
    message.first().and_then(ScriptReply::as_text) == Some(kind)
}

/// Returns whether these are the names and values that HELLO answers with.
fn is_greeting(list: &[ScriptReply]) -> bool {
    let mut names = list.iter().step_by(2);
    names.any(|name| name.as_text() == Some("server"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::codec::{Decoder, Frame};
    use super::*;
    use crate::step::Script;

    static GET: Script = Script::batchable("return KEYS[1]", 1, 1);
    static SET: Script = Script::batchable("return ARGV[1]", 1, 1);

    fn script(script: &'static Script) -> &'static Batchable {
        script.for_batch(1, 1).unwrap()
    }

    fn step(of: &str, number: usize) -> Cmd {
        let mut cmd = Cmd::of(&["EVALSHA", of]);
        cmd.keys(&[format!("key{number}").into()]);
        cmd.text(&format!("arg{number}"));
        cmd
    }

    /// Takes the complete commands, which are lists of texts.
    fn commands(bytes: &mut Vec<u8>) -> Vec<Vec<String>> {
        let (mut decoder, mut at, mut end, mut commands) = (Decoder::default(), 0, 0, Vec::new());
        while let Some(frame) = decoder.decode(bytes, &mut at).unwrap() {
            let Frame::Reply(command) = frame else {
                panic!("no command");
            };
            let args = command.elements().unwrap().iter();
            commands.push(args.map(|arg| arg.as_text().unwrap().to_owned()).collect());
            end = at;
        }
        bytes.drain(..end);
        commands
    }

    /// Returns what the server replies: the key of each step.
    fn reply_to(command: &[String]) -> ScriptReply {
        let keys: usize = command[2].parse().unwrap();
        let key = |key: &String| ScriptReply::from(&**key);
        match &command[3..3 + keys] {
            [one] => key(one),
            more => ScriptReply::List(more.iter().map(key).collect()),
        }
    }

    /// Takes all that is in the buffer.
    fn written(pipeline: &mut Pipeline) -> Vec<Vec<String>> {
        let mut bytes = pipeline.output().to_vec();
        pipeline.wrote(bytes.len());
        let commands = commands(&mut bytes);
        assert!(bytes.is_empty(), "half a command");
        commands
    }

    fn pack(pipeline: &mut Pipeline) -> Vec<usize> {
        let mut packed = Vec::new();
        pipeline.pack(Instant::now(), |steps| packed.push(steps));
        packed
    }

    fn ping(pipeline: &mut Pipeline) -> SlotId {
        pipeline.send(&Cmd::of(&["PING"]), Expects::Reply, Instant::now())
    }

    fn get(pipeline: &mut Pipeline, number: usize) -> SlotId {
        pipeline.send_step(&step("get", number), script(&GET), Instant::now())
    }

    /// Packs two steps behind a PING. Returns their slots.
    fn pack_two(pipeline: &mut Pipeline) -> [SlotId; 2] {
        ping(pipeline);
        let slots = [1, 2].map(|number| get(pipeline, number));
        pack(pipeline);
        slots
    }

    fn receive(pipeline: &mut Pipeline, reply: ScriptReply) -> Vec<SlotId> {
        pipeline.receive(reply, Instant::now()).unwrap();
        std::mem::take(&mut pipeline.answered)
    }

    #[test]
    fn step_is_sent_at_once_if_nothing_is_in_flight() {
        let mut pipeline = Pipeline::default();
        let first = get(&mut pipeline, 1);
        assert_eq!(written(&mut pipeline).len(), 1);
        get(&mut pipeline, 2);
        assert!(pipeline.output().is_empty() && pipeline.has_output());
        assert_eq!(receive(&mut pipeline, ScriptReply::Integer(1)), [first]);
        let answered = pipeline.take(first).unwrap();
        assert_eq!(answered.reply, Some(ScriptReply::Integer(1)));
        assert!(answered.sent_at.is_some() && !answered.refused);
        assert!(pipeline.take(first).is_none());
    }

    fn sending_alone(alone: usize) -> Pipeline {
        Pipeline::new(Packing {
            alone,
            ..Packing::default()
        })
    }

    #[test]
    fn steps_in_scripts_count_as_in_flight() {
        let alone = 3;
        let mut pipeline = sending_alone(alone);
        for number in 0..2 * alone {
            get(&mut pipeline, number);
        }
        assert_eq!(pack(&mut pipeline), [alone]);
        written(&mut pipeline);
        for _ in 0..alone {
            receive(&mut pipeline, ScriptReply::Nil);
        }
        get(&mut pipeline, 0);
        assert!(pipeline.output().is_empty());
    }

    #[test]
    fn few_steps_are_sent_alone_unless_others_wait() {
        let mut pipeline = sending_alone(3);
        let alone: Vec<SlotId> = (0..3).map(|number| get(&mut pipeline, number)).collect();
        assert_eq!(written(&mut pipeline).len(), 3);
        let waits = get(&mut pipeline, 3);
        assert!(pipeline.output().is_empty());
        assert_eq!(receive(&mut pipeline, ScriptReply::Nil), [alone[0]]);
        get(&mut pipeline, 4);
        assert!(
            pipeline.output().is_empty(),
            "not before the one that waits"
        );
        assert_eq!(pack(&mut pipeline), [2]);
        assert!(!pipeline.abandon(waits), "it was sent");
    }

    #[test]
    fn waiting_steps_of_one_script_are_packed() {
        let mut pipeline = Pipeline::default();
        let ping = ping(&mut pipeline);
        let slots = [1, 2, 3].map(|number| get(&mut pipeline, number));
        let other = pipeline.send_step(&step("set", 4), script(&SET), Instant::now());
        let (sent_at, mut sizes) = (Instant::now() + Duration::from_secs(1), Vec::new());
        pipeline.pack(sent_at, |steps| sizes.push(steps));
        assert_eq!(sizes, [3, 1]);
        let commands = written(&mut pipeline);
        assert_eq!(commands[1][0], "EVAL");
        let args = ["3", "key1", "key2", "key3", "arg1", "arg2", "arg3"];
        assert_eq!(commands[1][2..], args);
        assert_eq!(commands[2], ["EVALSHA", "set", "1", "key4", "arg4"]);
        assert_eq!(receive(&mut pipeline, ScriptReply::Nil), [ping]);
        // The other rounds may be in flight, too, but no more.
        let rounds = pipeline.packing.rounds;
        for round in 1..=rounds {
            get(&mut pipeline, 5);
            let packed: &[usize] = if round < rounds { &[1] } else { &[] };
            assert_eq!(pack(&mut pipeline), packed);
        }
        assert_eq!(receive(&mut pipeline, reply_to(&commands[1])), slots);
        for (slot, number) in slots.into_iter().zip(1..) {
            let answered = pipeline.take(slot).unwrap();
            let key = ScriptReply::from(&*format!("key{number}"));
            assert_eq!(answered.reply, Some(key));
            assert!(!answered.refused);
            // Not when it was answered, or earlier: leases count from here.
            assert_eq!(answered.sent_at, Some(sent_at));
        }
        assert_eq!(
            pack(&mut pipeline),
            [0usize; 0],
            "the round is not complete"
        );
        assert_eq!(receive(&mut pipeline, reply_to(&commands[2])), [other]);
        assert_eq!(pack(&mut pipeline), [1]);
    }

    /// On a slow network, waiting for the other rounds would take long.
    #[test]
    fn more_rounds_are_in_flight_the_longer_they_take() {
        let Packing {
            rounds,
            most_rounds,
            ..
        } = Packing::default();
        for (took, more) in [(0, 0), (1, 1), (10, 10), (1000, most_rounds - rounds)] {
            let mut pipeline = Pipeline::default();
            ping(&mut pipeline);
            get(&mut pipeline, 0);
            let began = Instant::now();
            pipeline.pack(began, |_| {});
            receive(&mut pipeline, ScriptReply::Nil);
            let now = began + took * ROUND_TIME;
            let key = ScriptReply::Integer(0);
            pipeline.receive(key, now).unwrap();
            ping(&mut pipeline);
            for number in 0..rounds + more {
                get(&mut pipeline, number);
                assert_eq!(pack(&mut pipeline), [1]);
            }
            get(&mut pipeline, 0);
            assert_eq!(pack(&mut pipeline), [0usize; 0]);
        }
    }

    /// It takes the others with it. Else releases would wait as long as there are full scripts of
    /// acquisitions.
    #[test]
    fn full_script_does_not_wait() {
        let mut pipeline = Pipeline::default();
        let Packing { rounds, steps, .. } = pipeline.packing;
        ping(&mut pipeline);
        for number in 0..rounds {
            get(&mut pipeline, number);
            assert_eq!(pack(&mut pipeline), [1]);
        }
        let other = pipeline.send_step(&step("set", 0), script(&SET), Instant::now());
        for number in 0..steps - 1 {
            get(&mut pipeline, number);
        }
        assert_eq!(pack(&mut pipeline), [0usize; 0]);
        get(&mut pipeline, steps);
        assert_eq!(pack(&mut pipeline), [steps, 1]);
        assert!(!pipeline.abandon(other), "it was sent");
    }

    /// An error of one step says nothing about the others, or whether this one has had an effect.
    #[test]
    fn error_of_a_step_is_no_refusal_of_its_script() {
        let mut pipeline = Pipeline::default();
        let slots = pack_two(&mut pipeline);
        receive(&mut pipeline, ScriptReply::Nil);
        let error = ScriptReply::error("NOPERM no");
        let replies = ScriptReply::List(vec![error.clone(), ScriptReply::Nil]);
        receive(&mut pipeline, replies);
        let answered = pipeline.take(slots[0]).unwrap();
        assert_eq!(answered.reply, Some(error));
        assert!(!answered.refused);
    }

    /// While the network is slow, the buffer is never empty.
    #[test]
    fn buffer_that_is_never_empty_does_not_grow() {
        let mut pipeline = Pipeline::default();
        let mut sent = 0;
        while sent < 4 * MAX_SPARE_BYTES {
            ping(&mut pipeline);
            let all_but_one = pipeline.output().len() - 1;
            sent += all_but_one;
            pipeline.wrote(all_but_one);
            assert!(pipeline.out.len() < 2 * MAX_SPARE_BYTES);
        }
    }

    /// A server that has been restarted does not know it.
    #[test]
    fn unknown_script_is_sent_with_its_source_again() {
        let mut pipeline = Pipeline::default();
        let send_two = |pipeline: &mut Pipeline| {
            let slots = pack_two(pipeline);
            let command = written(pipeline).pop().unwrap();
            (slots, command[0].clone())
        };
        let (first, command) = send_two(&mut pipeline);
        assert_eq!(command, "EVAL");
        let (second, command) = send_two(&mut pipeline);
        assert_eq!(command, "EVALSHA");
        receive(&mut pipeline, ScriptReply::Nil);
        let list = ScriptReply::List(vec![ScriptReply::Nil, ScriptReply::Nil]);
        assert_eq!(receive(&mut pipeline, list), first);
        receive(&mut pipeline, ScriptReply::Nil);
        let error = ScriptReply::error("NOSCRIPT No matching script.");
        assert_eq!(receive(&mut pipeline, error.clone()), second);
        for slot in second {
            let answered = pipeline.take(slot).unwrap();
            assert_eq!(answered.reply.as_ref(), Some(&error));
            assert!(answered.refused, "each caller sends its step alone");
        }
        assert_eq!(send_two(&mut pipeline).1, "EVAL");
    }

    #[test]
    fn canceled_step_that_waits_is_never_sent() {
        let mut pipeline = Pipeline::default();
        ping(&mut pipeline);
        let [a, b, c] = [1, 2, 3].map(|number| get(&mut pipeline, number));
        assert!(pipeline.abandon(b));
        pack(&mut pipeline);
        assert!(!pipeline.abandon(a), "it was sent");
        let commands = written(&mut pipeline);
        assert_eq!(commands[1][3..5], ["key1", "key3"]);
        receive(&mut pipeline, ScriptReply::Nil);
        assert_eq!(receive(&mut pipeline, reply_to(&commands[1])), [a, c]);
    }

    #[test]
    fn slots_are_used_again_after_their_replies() {
        let mut pipeline = Pipeline::default();
        let first = ping(&mut pipeline);
        assert!(!pipeline.abandon(first));
        let second = ping(&mut pipeline);
        assert_ne!(first, second, "the reply to the first is still to come");
        assert_eq!(receive(&mut pipeline, ScriptReply::Nil), [first]);
        assert!(!pipeline.is_unanswered(first) && pipeline.is_unanswered(second));
        assert_eq!(ping(&mut pipeline), first);
    }

    #[test]
    fn subscriptions_are_confirmed_by_messages_or_refused() {
        let mut pipeline = Pipeline::default();
        let message = |kind, channel| [kind, channel].map(ScriptReply::from);
        let subscribe = Cmd::of(&["SUBSCRIBE", "a", "b"]);
        let expects = Expects::Confirmations("subscribe", 2);
        for refused in [false, true] {
            let slot = pipeline.send(&subscribe, expects, Instant::now());
            let later = ping(&mut pipeline);
            if refused {
                let error = ScriptReply::error("NOPERM no");
                assert_eq!(receive(&mut pipeline, error), [slot]);
            } else {
                for other in [message("message", "a"), message("ssubscribe", "a")] {
                    pipeline.confirm(&other);
                }
                pipeline.confirm(&message("subscribe", "a"));
                assert!(pipeline.answered.is_empty());
                pipeline.confirm(&message("subscribe", "b"));
                assert_eq!(std::mem::take(&mut pipeline.answered), [slot]);
            }
            assert_eq!(receive(&mut pipeline, ScriptReply::Nil), [later]);
        }
        // By a reply: so messages are replies, too.
        pipeline.send(&subscribe, expects, Instant::now());
        let reply = ScriptReply::List(message("subscribe", "a").into());
        let error = pipeline.receive(reply, Instant::now()).unwrap_err();
        assert!(error.is_message);
        // Whatever the server takes this for, it does not say that there is a subscription.
        pipeline.send(&subscribe, expects, Instant::now());
        let reply = ScriptReply::Integer(1);
        let received = pipeline.receive(reply, Instant::now());
        let error = received.unwrap_err();
        assert!(!error.is_message);
        let error = error.to_string();
        assert!(error.contains("in place of the confirmation"), "{error}");
    }

    /// The server may end the subscription at the same time because the slot moves away, and then
    /// says so twice: with the message of an end, and with an error.
    #[test]
    fn end_of_a_subscription_takes_no_reply_of_others() {
        for error in [None, Some(ErrorReply::new("MOVED 1 :2"))] {
            let mut pipeline = Pipeline::default();
            let end = Cmd::of(&["SUNSUBSCRIBE", "b"]);
            let slot = pipeline.send(&end, Expects::End, Instant::now());
            let subscribe = Cmd::of(&["SSUBSCRIBE", "d"]);
            let expects = Expects::Confirmations("ssubscribe", 1);
            let later = pipeline.send(&subscribe, expects, Instant::now());
            for _ in 0..2 {
                pipeline.confirm(&["sunsubscribe", "b"].map(ScriptReply::from));
            }
            assert!(pipeline.answered.is_empty());
            if let Some(error) = error.clone() {
                assert!(receive(&mut pipeline, ScriptReply::Error(error)).is_empty());
            }
            assert_eq!(receive(&mut pipeline, greeting()), [slot]);
            let reply = error.map_or(ScriptReply::Nil, ScriptReply::Error);
            assert_eq!(pipeline.take(slot).unwrap().reply, Some(reply));
            pipeline.confirm(&["ssubscribe", "d"].map(ScriptReply::from));
            assert_eq!(pipeline.answered, [later]);
        }
    }

    fn greeting() -> ScriptReply {
        ScriptReply::List(
            ["server", "redis", "proto", "3"]
                .map(ScriptReply::from)
                .into(),
        )
    }

    /// HELLO itself is refused, so the error is taken for that of the end of a subscription.
    #[test]
    fn list_of_another_command_does_not_answer_the_end_of_a_subscription() {
        let mut pipeline = Pipeline::default();
        let end = Cmd::of(&["UNSUBSCRIBE", "b"]);
        pipeline.send(&end, Expects::End, Instant::now());
        pipeline.send(&Cmd::of(&["SCAN", "0"]), Expects::Reply, Instant::now());
        pipeline.confirm(&["unsubscribe", "b"].map(ScriptReply::from));
        let refused = ScriptReply::error("ERR unknown command");
        assert!(receive(&mut pipeline, refused).is_empty());
        let keys = ScriptReply::List(["0", "a"].map(ScriptReply::from).into());
        let error = pipeline.receive(keys, Instant::now()).unwrap_err();
        assert!(error.to_string().contains("does not fit"), "{error}");
    }

    #[test]
    fn whatever_does_not_fit_is_an_error() {
        let mut pipeline = Pipeline::default();
        for (reply, named) in [
            (ScriptReply::Integer(7), "Integer(7)"),
            (ScriptReply::Bytes(vec![b'x'; 1 << 20]), "xxx"),
            (
                ScriptReply::List(vec![ScriptReply::Nil; 1 << 20]),
                "a list of 1048576",
            ),
        ] {
            let error = pipeline.receive(reply, Instant::now()).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains("a reply to no command: ") && error.contains(named),
                "{error}"
            );
            assert!(error.len() < 200, "{error}");
        }
        let slots = pack_two(&mut pipeline);
        receive(&mut pipeline, ScriptReply::Nil);
        let reply = ScriptReply::List(vec![ScriptReply::Nil; 3]);
        let error = pipeline.receive(reply, Instant::now()).unwrap_err();
        let said = "another number of replies than the 2 steps in a script";
        assert_eq!(error.to_string(), format!("the server sent {said}"));
        pipeline.end();
        assert_eq!(
            pipeline.answered, slots,
            "the wrong replies answered nothing"
        );
    }

    #[test]
    fn end_says_what_was_sent() {
        let mut pipeline = Pipeline::default();
        let sent = ping(&mut pipeline);
        let waiting = get(&mut pipeline, 1);
        pipeline.end();
        assert_eq!(pipeline.answered, [sent, waiting]);
        let later = [ping(&mut pipeline), get(&mut pipeline, 2)];
        for (slot, was_sent) in [
            (sent, true),
            (waiting, false),
            (later[0], false),
            (later[1], false),
        ] {
            let answered = pipeline.take(slot).unwrap();
            assert_eq!(answered.reply, None);
            assert_eq!(answered.sent_at.is_some(), was_sent);
        }
        assert!(pipeline.output().is_empty() && !pipeline.has_output());
    }

    #[derive(Debug, Clone, Copy)]
    enum Move {
        Send,
        Step(bool),
        /// Of the callers that wait.
        Abandon(usize),
        Pack,
        Write(usize),
        /// The server executes a command and its reply arrives.
        Reply,
        End,
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        let one = prop_oneof![
            3 => Just(Move::Send),
            8 => any::<bool>().prop_map(Move::Step),
            2 => any::<usize>().prop_map(Move::Abandon),
            4 => Just(Move::Pack),
            4 => (0..400usize).prop_map(Move::Write),
            6 => Just(Move::Reply),
        ];
        let end = prop_oneof![4 => Just(None), 1 => Just(Some(Move::End))];
        (proptest::collection::vec(one, 0..120), end).prop_map(|(mut moves, end)| {
            moves.extend(end);
            moves
        })
    }

    prop_compose! {
        fn packing()(alone in 1..4_usize, rounds in 1..4_usize, more in 0..2_usize, steps in 1..5_usize) -> Packing {
            Packing { alone, rounds, most_rounds: rounds + more, steps }
        }
    }

    proptest! {
        /// Each caller gets the reply to its own command, or learns whether it was sent. What is
        /// canceled before it is sent never arrives, and whatever else was sent arrives once. In
        /// the end no caller waits.
        #[test]
        fn each_caller_gets_its_own_reply(moves in moves(), packing in packing()) {
            let mut pipeline = Pipeline::new(packing);
            let (mut waiting, mut unsent): (Vec<(SlotId, usize)>, Vec<usize>) = Default::default();
            let (mut arrived, mut executed) = (Vec::new(), VecDeque::new());
            let (mut count, mut wire) = (0, Vec::new());
            // Each answers one command at least.
            let rest = [Move::Pack, Move::Write(usize::MAX), Move::Reply].repeat(moves.len());
            for one in moves.into_iter().chain(rest) {
                match one {
                    Move::Send => {
                        let slot = pipeline.send(&step("alone", count), Expects::Reply, Instant::now());
                        waiting.push((slot, count));
                        count += 1;
                    }
                    Move::Step(which) => {
                        let of = if which { &GET } else { &SET };
                        let slot = pipeline.send_step(&step("step", count), script(of), Instant::now());
                        waiting.push((slot, count));
                        count += 1;
                    }
                    Move::Abandon(which) if !waiting.is_empty() => {
                        let (slot, number) = waiting.swap_remove(which % waiting.len());
                        if pipeline.abandon(slot) {
                            unsent.push(number);
                        }
                    }
                    Move::Abandon(_) => {}
                    Move::Pack => drop(pack(&mut pipeline)),
                    Move::Write(bytes) => {
                        let output = pipeline.output();
                        let bytes = bytes.min(output.len());
                        wire.extend_from_slice(&output[..bytes]);
                        pipeline.wrote(bytes);
                        for command in commands(&mut wire) {
                            let keys: usize = command[2].parse().unwrap();
                            arrived.extend(command[3..3 + keys].iter().cloned());
                            executed.push_back(reply_to(&command));
                        }
                    }
                    Move::Reply => {
                        if let Some(reply) = executed.pop_front() {
                            receive(&mut pipeline, reply);
                        }
                    }
                    Move::End => {
                        pipeline.end();
                        // No caller waits for what arrives now.
                        executed.clear();
                    }
                }
                waiting.retain(|&(slot, number)| match pipeline.take(slot) {
                    Some(Answered { reply: Some(reply), sent_at, .. }) => {
                        assert!(sent_at.is_some());
                        assert_eq!(reply.as_text(), Some(&*format!("key{number}")));
                        false
                    }
                    Some(Answered { reply: None, sent_at, .. }) => {
                        if sent_at.is_none() {
                            unsent.push(number);
                        }
                        false
                    }
                    None => true,
                });
            }
            prop_assert!(waiting.is_empty(), "without an answer: {waiting:?}");
            let mut once = arrived.clone();
            once.sort();
            once.dedup();
            prop_assert_eq!(once.len(), arrived.len(), "a step has arrived twice");
            for number in unsent {
                prop_assert!(!arrived.contains(&format!("key{number}")), "{} was not sent", number);
            }
        }
    }
}
