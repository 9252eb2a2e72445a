//! A master, two replicas and three sentinels.

use redlatch_testkit::{Proxy, SentinelPlan, Sentinels, Server, fake_sentinel};

use super::{DURABLE, Deployment, Needs};
use crate::Result;

pub(super) struct SentinelDeployment {
    all: Sentinels,
    url: String,
    /// Between clients and sentinels, if that network can be broken.
    proxies: Vec<Proxy>,
    /// The server that a wrong sentinel reports as the master.
    decoy: Option<Server>,
}

impl SentinelDeployment {
    pub(super) fn start(needs: Needs) -> SentinelDeployment {
        let all = Sentinels::start_with(SentinelPlan {
            server_args: if needs.durable { &DURABLE } else { &[] },
            separate_addresses: needs.partitions,
            ..SentinelPlan::default()
        });
        let mut url = all.url();
        let decoy = needs.fake_sentinel.then(Server::start);
        if let (Some(decoy), Some(honest)) = (&decoy, all.sentinels().first()) {
            // Clients know two correct sentinels and a wrong one.
            let fake_port = fake_sentinel(decoy.port());
            url = url.replacen(&format!(":{}", honest.port()), &format!(":{fake_port}"), 1);
        }
        let mut proxies = Vec::new();
        if needs.sentinel_network {
            for sentinel in all.sentinels() {
                let proxy = Proxy::to_server(sentinel);
                let (direct, through) = (
                    format!("{}:{}", sentinel.address(), sentinel.port()),
                    format!("127.0.0.1:{}", proxy.port()),
                );
                url = url.replacen(&direct, &through, 1);
                proxies.push(proxy);
            }
        }
        SentinelDeployment {
            all,
            url,
            proxies,
            decoy,
        }
    }
}

impl Deployment for SentinelDeployment {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn masters(&self) -> Vec<usize> {
        vec![self.all.master()]
    }

    fn server(&self, place: usize) -> &Server {
        &self.all.servers()[place]
    }

    fn servers(&self) -> Vec<&Server> {
        self.all
            .servers()
            .iter()
            .chain(self.all.sentinels())
            .collect()
    }

    fn kill(&mut self, place: usize) {
        self.all.kill(place);
    }

    fn restart(&mut self, place: usize) {
        self.all.restart(place);
    }

    fn await_successor(&self, place: usize) -> Result<()> {
        self.all.await_new_master(place);
        Ok(())
    }

    fn hand_over(&self, _: usize) -> Result<()> {
        self.all.fail_over();
        Ok(())
    }

    fn await_healthy(&self) {
        self.all.await_healthy();
    }

    fn sentinels(&mut self) -> Option<&mut Sentinels> {
        Some(&mut self.all)
    }

    fn sentinel_network(&self) -> &[Proxy] {
        &self.proxies
    }

    fn decoy(&self) -> Option<&Server> {
        self.decoy.as_ref()
    }
}
