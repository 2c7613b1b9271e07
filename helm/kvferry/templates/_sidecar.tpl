{{- /* The sidecar's container, as an init container that goes on (sidecar mode) or the only one. */ -}}
{{- define "kvferry.sidecarContainer" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: kvferry
  image: {{ include "kvferry.image" (dict "root" . "image" .Values.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if eq .Values.mode "sidecar" }}
  restartPolicy: Always
  {{- end }}
  args: [serve]
  env:
    # All settings are in this file; so `kubectl exec -- kvferry status` needs no flags.
    - name: KVFERRY_CONFIG
      value: {{ include "kvferry.configDir" . }}/kvferry.toml
    - name: HOME
      value: /tmp
    {{- if hasPrefix "mooncake:" (include "kvferry.remoteUrl" .) }}
    # Mooncake's client writes lines of its own: its warnings are enough.
    - name: GLOG_minloglevel
      value: "1"
    {{- end }}
    {{- include "kvferry.gpuEnv" . | trim | nindent 4 }}
    {{- with .Values.sidecar.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "kvferry.sidecarProbes" . | nindent 2 }}
  resources:
    requests:
      cpu: {{ .Values.sidecar.cpu | quote }}
      memory: {{ $sizes.memoryMi }}Mi
      {{- with .Values.pool.hugepages }}
      hugepages-{{ . }}: {{ $sizes.hugepagesMi }}Mi
      {{- end }}
    limits:
      memory: {{ $sizes.memoryMi }}Mi
      {{- with .Values.pool.hugepages }}
      hugepages-{{ . }}: {{ $sizes.hugepagesMi }}Mi
      {{- end }}
      {{- with .Values.rdma.resources }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if has .Values.gpu.access (list "dra" "draAdmin") }}
    claims:
      - name: gpu
    {{- end }}
  securityContext:
    {{- include "kvferry.sidecarSecurity" . | nindent 4 }}
  volumeMounts:
    - name: run
      mountPath: {{ include "kvferry.mountDir" . }}
    - name: pool
      mountPath: {{ include "kvferry.poolDir" . }}
    - name: config
      mountPath: {{ include "kvferry.configDir" . }}
      readOnly: true
    {{- if .Values.http.token.existingSecret }}
    - name: http-token
      mountPath: {{ include "kvferry.secretsDir" . }}/http
      readOnly: true
    {{- end }}
    {{- if .Values.remote.password.existingSecret }}
    - name: store-password
      mountPath: {{ include "kvferry.secretsDir" . }}/store
      readOnly: true
    {{- end }}
    {{- if .Values.disk.size }}
    - name: disk
      mountPath: {{ include "kvferry.diskDir" . }}
    {{- end }}
    - name: sidecar-tmp
      mountPath: /tmp
    {{- with .Values.sidecar.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "kvferry.sidecarSecurity" -}}
{{- if eq .Values.gpu.access "privileged" -}}
privileged: true
readOnlyRootFilesystem: true
{{- else -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .Values.rdma.ipcLock }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}
{{- end }}

{{- /* Volumes of the pod that holds the sidecar, but for "run". */ -}}
{{- define "kvferry.sidecarVolumes" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: pool
  emptyDir:
    {{- with .Values.pool.hugepages }}
    medium: HugePages-{{ . }}
    {{- else }}
    medium: Memory
    sizeLimit: {{ $sizes.shmMi }}Mi
    {{- end }}
- name: config
  configMap:
    name: {{ include "kvferry.fullname" . }}-sidecar
{{- with .Values.http.token.existingSecret }}
- name: http-token
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - key: {{ $.Values.http.token.key }}
        path: token
{{- end }}
{{- with .Values.remote.password.existingSecret }}
- name: store-password
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - key: {{ $.Values.remote.password.key }}
        path: password
{{- end }}
{{- if .Values.disk.size }}
- name: disk
  {{- /* A default is merged into what is given: a source that was chosen replaces it. */}}
  {{- $source := omit .Values.disk.volume "emptyDir" | default .Values.disk.volume }}
  {{- toYaml $source | nindent 2 }}
{{- end }}
- name: sidecar-tmp
  emptyDir:
    sizeLimit: 256Mi
{{- with .Values.sidecar.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvferry.podSecurity" -}}
runAsNonRoot: {{ ne (int64 .Values.user) 0 }}
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
fsGroup: {{ int64 .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvferry.podCommon" -}}
automountServiceAccountToken: false
# Services named kvferry would otherwise put variables of that name into every container.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Started means: the pool is taken and the sockets listen. It never waits for ranks: they come
after it, and the engine waits for this. Alive means: the control loop turns. */ -}}
{{- define "kvferry.sidecarProbes" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
ports:
  - name: probes
    containerPort: {{ int64 .Values.http.probesPort }}
  {{- if and .Values.ui.enabled .Values.ui.fleet }}
  - name: api
    containerPort: {{ include "kvferry.fleetPort" . }}
  {{- end }}
startupProbe:
  httpGet:
    path: /startupz
    port: probes
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: {{ int64 $sizes.startupSeconds }}
readinessProbe:
  httpGet:
    path: {{ eq .Values.http.readiness "ranks" | ternary "/readyz" "/startupz" }}
    port: probes
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet:
    path: /livez
    port: probes
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
