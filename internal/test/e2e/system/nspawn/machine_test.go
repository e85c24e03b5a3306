package nspawn

import (
	"os"
	"testing"
	"time"
)

// After a power cut no process in the machine notices the end of PID 1.
func TestPowerCutEndsAllAtOnce(t *testing.T) {
	m := New(t, "bookworm")
	m.Write("/root/observe.pl", `use Socket;
socket(my $s, PF_UNIX, SOCK_DGRAM, 0) or die;
my $notify = pack_sockaddr_un("/run/systemd/notify");
connect($s, $notify) or die;
mkdir "/root/began";
1 while connect($s, $notify);
mkdir "/root/saw-the-end";
`)
	m.Write("/etc/systemd/system/observe.service", "[Service]\nExecStart=/usr/bin/perl /root/observe.pl\n")
	m.Boot()
	m.Run("systemctl", "start", "observe.service")
	exists := func(path string) error {
		_, err := os.Stat(m.Path(path))
		return err
	}
	m.Eventually(time.Minute, "the observer", func() error { return exists("/root/began") })
	m.PowerCut()
	if !os.IsNotExist(exists("/root/saw-the-end")) {
		t.Error("a process saw PID 1 gone")
	}
}
