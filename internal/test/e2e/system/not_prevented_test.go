package system

// The sentences below "Not prevented" in SECURITY.md: `make test` compares them.
const (
	deputies  = "have drivers mount and unmount volumes: it is root wherever a configured driver may mount"
	sockets   = "connect to every socket of root that the unit does not hide"
	pods      = "read what pods and containers have below root_dir, /run/containers and /var/lib/docker"
	files     = "read every other file of root that the unit does not hide, such as those in /etc and /var/log"
	forgery   = "write entries into the journal in the name of other programs"
	space     = "fill /run, and the file system of root_dir, with files"
	manager   = "make systemd kill a process of any user, delay the stop of the unit forever, and show control characters in systemctl status"
	processes = "signal other processes of root where Linux is older than 6.12, and reach memory and files of those without capabilities, and root's FIFOs in /run, where Landlock is not in force"
	lateMount = "read the kubelet's keys below a mount over root_dir, from the mount until the daemon has ended for a new sandbox"
	flags     = "set flags, such as nodump, of root's files on what is mounted after its start: a filter cannot tell one ioctl from another"
	ipc       = "use System V and POSIX IPC of root under systemd 247"
)

// notPrevented lists what cmd/sandbox reaches from inside the unit although nobody wants it to.
var notPrevented = map[string]string{
	"connect to /run/driver/csi.sock":                               deputies,
	"connect to /var/lib/kubelet/plugins/driver/csi.sock":           deputies,
	"connect to /run/other/service.sock":                            sockets,
	"read /var/lib/kubelet/pods/p/token":                            pods,
	"read /var/lib/kubelet/plugins/kubernetes.io/csi/vol_data.json": pods,
	"read /run/containers/storage/config.json":                      pods,
	"read /var/lib/docker/containers/c/config.v2.json":              pods,
	"read /etc/krb5.keytab":                                         files,
	"read /var/log/secret":                                          files,
	"connect to /run/systemd/journal/socket":                        forgery,
	"make a file in /run/csi-registrar/registrations":               space,
	"make a file in /run/csi-registrar/state":                       space,
	"make a file in /var/lib/kubelet/plugins_registry":              space,
	"connect to /run/systemd/notify":                                manager,
}

// unconfined lists what it also reaches on kernels without Landlock.
var unconfined = map[string]string{
	"change /run/fifo":                           processes,
	"look into the root of another process":      processes,
	"signal a process of root":                   processes,
	"write into the memory of a process of root": processes,
}

// belowAMount lists what it also reaches after a mount over root_dir.
var belowAMount = map[string]string{
	"set the flags of /var/lib/kubelet/config.yaml": flags,
	"read /var/lib/kubelet/.dockercfg":              lateMount,
	"read /var/lib/kubelet/bootstrap-kubeconfig":    lateMount,
	"read /var/lib/kubelet/config.json":             lateMount,
	"read /var/lib/kubelet/kubeconfig":              lateMount,
	"read /var/lib/kubelet/pki/key":                 lateMount,
}

// under247 lists what it also reaches under systemd 247, which does not know PrivateIPC=.
var under247 = map[string]string{"call shmget": ipc, "call semget": ipc, "call msgget": ipc, "call mq_open": ipc}
